"""FairScale's tutorial of Pipe: a sequential model in two parts, a batch in four chunks."""

import fairscale
import made_up
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
model = fairscale.nn.Pipe(made_up.convnet(), balance=[4, 3], devices=["cpu", "cpu"], chunks=4, checkpoint="except_last")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = made_up.digits(64).tensors
losses = []
for step in range(4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[16 * step : 16 * step + 16]), labels[16 * step : 16 * step + 16])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
if dist.get_rank() == 0:
    made_up.report("pipe", losses)
