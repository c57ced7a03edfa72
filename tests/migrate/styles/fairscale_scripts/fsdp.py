"""FairScale's tutorial of FSDP: the whole model wrapped, its optimizer made afterwards."""

import made_up
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817 - as such scripts write it
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
model = FSDP(made_up.convnet())
optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
dataset = made_up.digits(64)
losses = []
for data, target in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False)):
    model.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    made_up.report("fsdp", losses)
