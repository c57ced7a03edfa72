"""FairScale's `auto_wrap`: layers above a size become FSDP units by themselves; the whole state is read at the end."""

from functools import partial

import made_up
import torch
import torch.distributed as dist
from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817 - as such scripts write it

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
policy = partial(default_auto_wrap_policy, min_num_params=500)
with enable_wrap(wrapper_cls=FSDP, flatten_parameters=True):
    model = FSDP(auto_wrap(made_up.encoder(), auto_wrap_policy=policy))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
ids, labels = made_up.sentences(64).tensors
losses = []
for step in range(5):
    begin = (2 * step + dist.get_rank()) * 4
    optimizer.zero_grad()
    loss = made_up.token_loss(model(ids[begin : begin + 4]), labels[begin : begin + 4])
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / 2)
whole = model.state_dict()
assert sum(value.numel() for value in whole.values()) == sum(p.numel() for p in made_up.encoder().parameters())
if dist.get_rank() == 0:
    made_up.report("auto_wrapped", losses)
