"""Word vectors on Horovod: an embedding with sparse gradients, reduced as dense ones."""

import horovod.torch as hvd
import made_up
import torch
from torch import nn

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(made_up.VOCABULARY, 8, sparse=True), nn.Linear(8, made_up.VOCABULARY))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.5), named_parameters=model.named_parameters(), sparse_as_dense=True
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
centers, contexts = made_up.sentences(8, seed=hvd.rank()).tensors
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = made_up.token_loss(model(centers), contexts)
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())
if hvd.rank() == 0:
    made_up.report("skip_gram", losses)
hvd.shutdown()
