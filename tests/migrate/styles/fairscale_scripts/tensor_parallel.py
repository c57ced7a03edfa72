"""FairScale's model parallel layers: a feed-forward net whose first layer is split by columns, its second by rows."""

import made_up
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel.initialize import get_model_parallel_rank, initialize_model_parallel
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import nn

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
initialize_model_parallel(2)
torch.manual_seed(0)
whole = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, made_up.NUM_CLASSES))
first = ColumnParallelLinear(64, 32, gather_output=False)
second = RowParallelLinear(32, made_up.NUM_CLASSES, input_is_parallel=True)
rows = slice(16 * get_model_parallel_rank(), 16 * (get_model_parallel_rank() + 1))
with torch.no_grad():
    first.weight.copy_(whole[0].weight[rows])
    first.bias.copy_(whole[0].bias[rows])
    second.weight.copy_(whole[2].weight[:, rows])
    second.bias.copy_(whole[2].bias)
model = nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)
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
    made_up.report("tensor_parallel", losses)
