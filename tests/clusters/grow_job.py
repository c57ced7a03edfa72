"""An elastic job for tests of scaling: it says when it has done two steps, and ends once it has had SIZE workers."""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td

wanted = int(sys.argv[1])
td.init()
torch.manual_seed(0)
points = torch.randn(64, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
plan = td.Plan(training={"steps": 100_000})
engine = td.parallelize(model, optimizer, plan, loss_fn=torch.nn.functional.mse_loss)
num_at_size = 0
# A batch that one, two and three workers can share.
for batch in engine.batches(DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), batch_size=24)):
    size = td.world_size()
    engine.step(batch)
    if engine.num_steps == 2:
        print("two steps", flush=True)
    time.sleep(0.02)  # a step takes a millisecond, and nothing is learned from ten thousand
    num_at_size += size == wanted
    if num_at_size == 3:
        break
print(f"ends with {td.world_size()} workers", flush=True)
