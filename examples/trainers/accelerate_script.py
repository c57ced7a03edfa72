"""An Accelerate script on our backend.

torsh run --nproc-per-node 2 examples/trainers/accelerate_script.py
torchrun --nproc-per-node 2 examples/trainers/accelerate_script.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td

td.init()
torch.manual_seed(0)
points = torch.randn(512, 16)
data = TensorDataset(points, points.abs().mean(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32))
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    mean = accelerator.gather(loss.detach().reshape(1)).mean()
    accelerator.print(f"epoch {epoch}: loss {mean.item():.4f} on {torch.distributed.get_backend()}")
accelerator.end_training()
