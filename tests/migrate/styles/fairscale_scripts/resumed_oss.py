"""Sharded optimizer state of FairScale, consolidated on one rank, saved, and loaded by all into a new optimizer."""

import made_up
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.oss import OSS

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
ids, labels = made_up.sentences(64).tensors
losses = []


def start(seed):
    model = made_up.reader(seed)
    optimizer = OSS(params=model.parameters(), optim=torch.optim.Adam, lr=0.02)
    return model, ShardedDDP(model, optimizer), optimizer


def train(wrapped, optimizer, first, last):
    for step in range(first, last):
        begin = (2 * step + dist.get_rank()) * 4
        optimizer.zero_grad()
        loss = made_up.token_loss(wrapped(ids[begin : begin + 4]), labels[begin : begin + 4])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)


model, wrapped, optimizer = start(0)
train(wrapped, optimizer, 0, 3)
optimizer.consolidate_state_dict(recipient_rank=0)
saved = [model.state_dict(), optimizer.state_dict()] if dist.get_rank() == 0 else [None, None]
dist.broadcast_object_list(saved, src=0)
model, wrapped, optimizer = start(5)
model.load_state_dict(saved[0])
optimizer.load_state_dict(saved[1])
train(wrapped, optimizer, 3, 6)
if dist.get_rank() == 0:
    made_up.report("resumed_oss", losses)
