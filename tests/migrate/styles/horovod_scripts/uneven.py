"""Ranks with different numbers of batches on Horovod: who is done joins, and counts as zeros from there on."""

import horovod.torch as hvd
import made_up
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it
from torch.utils.data import DataLoader

hvd.init()
torch.set_num_threads(1)
model = made_up.convnet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
losses = []
for data, target in DataLoader(made_up.digits(32 - 8 * hvd.rank(), seed=hvd.rank()), batch_size=8):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
last = hvd.join()
assert last == 0, "rank 0 has one batch more"
if hvd.rank() == 0:
    made_up.report("uneven", losses)
hvd.shutdown()
