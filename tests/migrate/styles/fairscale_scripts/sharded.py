"""FairScale's tutorial of sharded DDP: gradients go to the rank that has the optimizer's state, also accumulated."""

import contextlib

import made_up
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.oss import OSS
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
model = made_up.convnet()
optimizer = OSS(params=model.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)
model = ShardedDDP(model, optimizer)
dataset = made_up.digits(64)
losses = []
for index, (data, target) in enumerate(
    DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False))
):
    with contextlib.nullcontext() if index % 2 else model.no_sync():
        loss = F.cross_entropy(model(data), target)
        (loss / 2).backward()
    if index % 2:
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    made_up.report("sharded", losses)
