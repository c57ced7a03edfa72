"""A recurrent language model on Horovod that clips: gradients are synchronized before, not in the step."""

import horovod.torch as hvd
import made_up
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

hvd.init()
torch.set_num_threads(1)
corpus = made_up.sentences(48)
sampler = DistributedSampler(corpus, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(corpus, batch_size=4, sampler=sampler)
model = made_up.reader()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
losses = []
for ids, labels in loader:
    optimizer.zero_grad()
    loss = made_up.token_loss(model(ids), labels)
    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    with optimizer.skip_synchronize():
        optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), op=hvd.Average).item())
if hvd.rank() == 0:
    made_up.report("language_model", losses)
hvd.shutdown()
