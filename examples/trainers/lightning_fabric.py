"""A loop with Lightning Fabric whose strategy is a plan: replicas with gradients compressed to int8.

torsh run --nproc-per-node 2 examples/trainers/lightning_fabric.py
torchrun --nproc-per-node 2 examples/trainers/lightning_fabric.py
"""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td
from torsh_distributed.integrations.lightning_fabric import TorshFabricStrategy

plan = td.Plan(compress={"method": "int8"})
fabric = Fabric(strategy=TorshFabricStrategy(plan=plan), accelerator="auto", devices=2)
fabric.launch()

torch.manual_seed(0)
points = torch.randn(512, 16)
data = TensorDataset(points, points.abs().mean(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))

for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    mean = fabric.all_reduce(loss.detach())
    fabric.print(f"epoch {epoch}: loss {mean:.4f} on {torch.distributed.get_backend()}")
