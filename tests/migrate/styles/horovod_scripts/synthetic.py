"""A synthetic benchmark in Horovod's style: one batch again and again, in groups of tensors, timed."""

import timeit

import horovod.torch as hvd
import made_up
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it

hvd.init()
torch.set_num_threads(1)
model = made_up.convnet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average, groups=2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = made_up.digits(8, seed=hvd.rank()).tensors
losses = []


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(hvd.allreduce(loss.detach(), name="loss").item())


img_secs = []
timeit.timeit(benchmark_step, number=1)
for _ in range(3):
    img_secs.append(8 * 2 / timeit.timeit(benchmark_step, number=2))
if hvd.rank() == 0:
    print(f"Img/sec per CPU: {sum(img_secs) / len(img_secs):.1f}")
    made_up.report("synthetic", losses)
hvd.shutdown()
