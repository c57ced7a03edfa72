"""FairScale's tutorial of OSS: DDP around the model, an optimizer whose state is sharded, clipped by it."""

import made_up
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from fairscale.optim.oss import OSS
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as such scripts write it
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
model = DDP(made_up.convnet())
optimizer = OSS(params=model.parameters(), optim=torch.optim.Adam, lr=0.01)
dataset = made_up.digits(64)
losses = []
for data, target in DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset, shuffle=False)):
    model.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.clip_grad_norm(0.5)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    made_up.report("oss", losses)
