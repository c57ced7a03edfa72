"""The script that every engine runs unchanged: a few steps of a small model; rank 0 writes the losses to a file."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td

td.init()
torch.manual_seed(0)
points = torch.randn(256, 8)
data = TensorDataset(points, points.sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
plan = td.Plan(training={"steps": 12, "batch_size": 32})
engine = td.parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
losses = [float(engine.step(batch)) for batch in engine.batches(DataLoader(data, batch_size=32, shuffle=True))]
print(f"rank {td.rank()} of {td.world_size()} ends at {losses[-1]:.6f}", flush=True)
if td.rank() == 0:
    Path(sys.argv[1]).write_text("\n".join(map(repr, losses)))
