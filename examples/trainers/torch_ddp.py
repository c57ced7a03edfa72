"""A plain torch script with DistributedDataParallel, on our backend.

torsh run --nproc-per-node 2 examples/trainers/torch_ddp.py
torchrun --nproc-per-node 2 examples/trainers/torch_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torsh_distributed as td

td.init()
torch.manual_seed(0)
points = torch.randn(512, 16)
data = TensorDataset(points, points.abs().mean(dim=1, keepdim=True))
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {mean.item():.4f} on {dist.get_backend()}")
dist.destroy_process_group()
