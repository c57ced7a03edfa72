"""FairScale's FSDP layer by layer: `enable_wrap` and `wrap`, layers that are recomputed, two passes an update."""

import contextlib

import made_up
import torch
import torch.distributed as dist
from fairscale.nn import checkpoint_wrapper
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817 - as such scripts write it
from fairscale.nn.wrap import enable_wrap, wrap

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
model = made_up.encoder()
with enable_wrap(wrapper_cls=FSDP, reshard_after_forward=True):
    for index, layer in enumerate(model.layers):
        model.layers[index] = wrap(checkpoint_wrapper(layer))
    model = wrap(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
ids, labels = made_up.sentences(64).tensors
losses = []
for step in range(8):
    begin = (2 * step + dist.get_rank()) * 4
    is_last = step % 2 == 1
    with contextlib.nullcontext() if is_last else model.no_sync():
        loss = made_up.token_loss(model(ids[begin : begin + 4]), labels[begin : begin + 4])
        (loss / 2).backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / 2)
if dist.get_rank() == 0:
    made_up.report("wrapped_layers", losses)
