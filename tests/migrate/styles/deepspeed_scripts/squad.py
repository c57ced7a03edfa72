"""BERT's fine-tuning on DeepSpeed: groups without weight decay, accumulation, ZeRO-2, a schedule of its own."""

import deepspeed
import made_up
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
deepspeed.init_distributed()
model = made_up.encoder()
param_optimizer = list(model.named_parameters())
no_decay = ["bias", "norm1.weight", "norm2.weight"]
optimizer_grouped_parameters = [
    {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
    {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(optimizer_grouped_parameters, lr=5e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "contiguous_gradients": True},
}
model, optimizer, _, scheduler = deepspeed.initialize(
    model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, dist_init_required=False
)
dataset = made_up.sentences(64)
world_size, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=False)
losses = []
for input_ids, labels in DataLoader(dataset, sampler=sampler, batch_size=4):
    loss = made_up.token_loss(model(input_ids.to(model.device)), labels.to(model.device))
    model.backward(loss)
    model.step()
    mean = loss.detach().clone()
    deepspeed.comm.all_reduce(mean)
    losses.append(mean.item() / world_size)
if rank == 0:
    made_up.report("squad", losses)
