"""Two engines, a moving average of one, and weights saved parameter by parameter, as RLHF scripts do."""

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--zero_stage", type=int, default=3)
parser.add_argument("--output_dir", required=True)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()


def params_to_fetch(params):
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def config(offload):
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": args.zero_stage,
            "offload_param": {"device": "cpu" if offload else "none"},
            "offload_optimizer": {"device": "cpu" if offload else "none"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def make_engine(offload=False):
    model = build()
    optimizer = FusedAdam(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + 0.1 * step))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(offload), lr_scheduler=schedule, dist_init_required=True
    )
    return engine


def save_zero_three_model(engine, path, zero_stage):
    is_three = zero_stage == 3
    model = engine.module if hasattr(engine, "module") else engine
    if not is_three:
        if torch.distributed.get_rank() == 0:
            torch.save(model.state_dict(), path)
        return
    whole = {}
    for name, value in model.named_parameters():
        if hasattr(value, "ds_id"):
            with deepspeed.zero.GatheredParameters(params_to_fetch([value]), enabled=is_three):
                copied = value.data.cpu()
                assert value.ds_status == ZeroParamStatus.AVAILABLE
                assert tuple(copied.shape) == tuple(value.ds_shape)
        else:
            copied = value.cpu()
        if torch.distributed.get_rank() == 0:
            whole[name] = copied.clone()
    if torch.distributed.get_rank() == 0:
        torch.save(whole, path)


def move_average(engine, average, beta=0.5):
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            fetch = params_to_fetch([param]) if args.zero_stage == 3 else []
            with deepspeed.zero.GatheredParameters(fetch, enabled=len(fetch) > 0):
                average[name] = torch.lerp(param.data.float().cpu(), average[name], beta)


deepspeed.init_distributed()
device = torch.device(get_accelerator().device_name(), max(args.local_rank, 0))
actor, critic = make_engine(), make_engine(offload=args.zero_stage == 3)
average = {
    name: torch.zeros(tuple(getattr(param, "ds_shape", param.shape))) for name, param in actor.module.named_parameters()
}
generator = torch.Generator().manual_seed(torch.distributed.get_rank())
losses = []
for _ in range(6):
    tokens = torch.randint(0, 32, (4, 8), generator=generator)
    for engine in (actor, critic):
        loss = (engine(tokens).float().mean(dim=1) - 1.0).square().mean()
        engine.backward(loss)
        engine.step()
    losses.append(loss.item())
    move_average(actor, average)
assert losses[-1] < losses[0]
assert actor.global_steps == 6
count = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in actor.module.parameters())
assert count == sum(p.numel() for p in build().parameters())
# A rank that changes a whole parameter changes it for everyone.
weight = critic.module[1].weight
with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
    if torch.distributed.get_rank() == 0:
        weight.data.fill_(0.25)
with deepspeed.zero.GatheredParameters([weight]):
    assert torch.equal(weight.data.float().cpu(), torch.full((16, 16), 0.25))
save_zero_three_model(actor, Path(args.output_dir) / "pytorch_model.bin", args.zero_stage)
if torch.distributed.get_rank() == 0:
    saved = torch.load(Path(args.output_dir) / "pytorch_model.bin", weights_only=True)
    assert {name: tuple(value.shape) for name, value in saved.items()} == {
        name: tuple(value.shape) for name, value in build().state_dict().items()
    }
    assert not torch.equal(saved["1.weight"].float(), build()[1].weight)
    print(f"saved {len(saved)} tensors, loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
