"""What short DeepSpeed scripts share: a small model, data of each rank, the same training by torch alone."""

import math
import tempfile

import deepspeed
import torch
from torch import nn
from torch.nn import functional

WIDTH, MICRO = 10, 2
ADAM = {"type": "Adam", "params": {"lr": 0.01}}

torch.set_num_threads(1)
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()


class Small(nn.Module):
    """Linear layers; forward returns the loss."""

    def __init__(self, depth=2, has_spare=False):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        if has_spare:
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs, labels, **_):
        for layer in self.linears:
            inputs = layer(inputs)
        return functional.cross_entropy(inputs.float(), labels)


def made(kind=Small, *arguments):
    torch.manual_seed(42)
    return kind(*arguments)


def config(stage=0, accumulation=1, zero=None, **more):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        **more,
    }


def engine_of(model, given, **more):
    if "optimizer" not in given and "optimizer" not in more:
        given = {**given, "optimizer": ADAM}
    if not callable(more.get("optimizer")) and "model_parameters" not in more:
        more["model_parameters"] = model.parameters()
    return deepspeed.initialize(model=model, config=given, **more)[0]


def batches(count, of_rank=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + (rank if of_rank is None else of_rank))
    return [
        (
            torch.randn(MICRO, WIDTH, generator=generator).to(dtype),
            torch.randint(0, WIDTH, (MICRO,), generator=generator),
        )
        for _ in range(count)
    ]


def trained(engine, data):
    """Mean losses over the ranks."""
    losses = []
    for inputs, labels in data:
        loss = engine(inputs, labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    return mean(losses)


def mean(losses):
    total = torch.stack(losses)
    deepspeed.comm.all_reduce(total)
    return (total / world_size).tolist()


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.0)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain(model, make=adamw, count=6, accumulation=1, clip=0.0, schedule=None):
    """The same by torch in one process."""
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    scheduler = schedule(optimizer) if schedule else None
    data = [batches(count, one) for one in range(world_size)]
    losses = []
    for step in range(count):
        loss = torch.stack([model(*own[step]) for own in data]).mean()
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
    return losses


def same(found, wanted, tolerance=1e-4):
    assert len(found) == len(wanted)
    assert all(math.isclose(*pair, rel_tol=tolerance) for pair in zip(found, wanted, strict=True)), (found, wanted)


def shared_folder():
    place = [tempfile.mkdtemp() if rank == 0 else None]
    deepspeed.comm.broadcast_object_list(place, 0)
    return place[0]


def run_all(names):
    """Call the functions of a script that begin with `case_`; each says that it has passed."""
    for name, case in list(names.items()):
        if name.startswith("case_"):
            case()
            deepspeed.comm.barrier()
            if rank == 0:
                print(f"passed {name.removeprefix('case_')}", flush=True)
