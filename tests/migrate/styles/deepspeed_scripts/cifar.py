"""Images on DeepSpeed as its first tutorial trains them: arguments, a loader of the engine, forward, backward, step."""

import argparse

import deepspeed
import made_up
import torch
import torch.nn.functional as F  # noqa: N812 - as such scripts write it

parser = argparse.ArgumentParser(description="Digits")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.set_num_threads(1)
deepspeed.init_distributed()
ds_config = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e7, "overlap_comm": True},
}
net = made_up.convnet()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=made_up.digits(64), config=ds_config
)
losses = []
for _ in range(args.epochs):
    for data in trainloader:
        inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
        loss = F.cross_entropy(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        mean = loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        losses.append(mean.item() / deepspeed.comm.get_world_size())
if deepspeed.comm.get_rank() == 0:
    made_up.report("cifar", losses)
