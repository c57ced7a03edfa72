"""FairScale's gradient scaler with sharded state: the loss is scaled, a step with overflow is left out."""

import made_up
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.optim.grad_scaler import ShardedGradScaler
from fairscale.optim.oss import OSS

torch.set_num_threads(1)
if not dist.is_initialized():
    dist.init_process_group(backend="gloo")
model = made_up.reader()
optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=0.02, weight_decay=0.0)
model = ShardedDDP(model, optimizer, reduce_buffer_size=0)
scaler = ShardedGradScaler(init_scale=1024.0, growth_interval=2)
ids, labels = made_up.sentences(64).tensors
losses = []
for step in range(5):
    begin = (2 * step + dist.get_rank()) * 4
    optimizer.zero_grad()
    loss = made_up.token_loss(model(ids[begin : begin + 4]), labels[begin : begin + 4])
    bad = float("inf") if step == 2 and dist.get_rank() == 1 else 1.0
    scaler.scale(loss * bad).backward()
    scaler.step(optimizer)
    scaler.update()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / 2)
if dist.get_rank() == 0:
    made_up.report("scaled", losses)
