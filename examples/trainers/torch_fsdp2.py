"""A plain torch script with FSDP2 (`fully_shard`), on our backend.

torsh run --nproc-per-node 2 examples/trainers/torch_fsdp2.py
torchrun --nproc-per-node 2 examples/trainers/torch_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torsh_distributed as td

td.init()
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(32, 1))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

torch.manual_seed(dist.get_rank())
for step in range(20):
    inputs = torch.randn(64, 32)
    loss = nn.functional.mse_loss(model(inputs), inputs.abs().mean(dim=1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0 and step % 10 == 9:
        print(f"step {step + 1}: loss {mean.item():.4f} on {dist.get_backend()}")
dist.destroy_process_group()
