"""The smallest complete job: two workers, one plan, the same losses as one process.

torsh run --nproc-per-node 2 examples/train.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td

td.init()
torch.manual_seed(0)
points = torch.randn(4096, 16)
data = TensorDataset(points, points.abs().mean(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(td.device())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

plan = td.Plan(training={"steps": 200, "batch_size": 128})
engine = td.parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
for batch in engine.batches(DataLoader(data, batch_size=128, shuffle=True)):
    loss = engine.step(batch)
    if td.rank() == 0 and engine.num_steps % 50 == 0:
        print(f"step {engine.num_steps}: loss {loss:.4f}")
