"""Training on Horovod that is saved by one rank after an epoch and taken up by all from there."""

import io

import horovod.torch as hvd
import made_up
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.set_num_threads(1)
dataset = made_up.digits(64)
sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
file = io.BytesIO()


def start(seed):
    """A model and an optimizer; of rank 0's file, if it has one."""
    model = made_up.convnet(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    resume_from_epoch = 0
    if hvd.rank() == 0 and file.tell():
        file.seek(0)
        found = torch.load(file, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        resume_from_epoch = found["epoch"]
    resume_from_epoch = hvd.broadcast_object(resume_from_epoch, root_rank=0, name="epoch")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=2
    )
    return model, optimizer, resume_from_epoch


def train(model, optimizer):
    """An epoch; two passes make an update."""
    for index, (data, target) in enumerate(loader):
        loss = F.cross_entropy(model(data), target)
        loss.div(2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())


losses = []
model, optimizer, epoch = start(seed=0)
train(model, optimizer)
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, file)
model, optimizer, epoch = start(seed=3)
assert epoch == 1
train(model, optimizer)
if hvd.rank() == 0:
    made_up.report("resumed", losses)
hvd.shutdown()
