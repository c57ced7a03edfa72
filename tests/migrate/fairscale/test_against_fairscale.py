"""The same model and data through FairScale and through ours: losses, states, gains and decisions are equal."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from tests.bed.needs import FAIRSCALE
from tests.bed.world import World
from torsh_distributed.migrate.fairscale import fairscale_modules

pytestmark = pytest.mark.needs_fairscale

STEPS = 20


def theirs() -> SimpleNamespace:
    """The real FairScale; it is built for older versions of torch, and warns."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(FAIRSCALE))
    import fairscale.nn
    import fairscale.nn.pipe.balance
    import fairscale.optim

    return SimpleNamespace(nn=fairscale.nn, optim=fairscale.optim, root=fairscale)


def ours() -> SimpleNamespace:
    found = fairscale_modules.namespaces()
    return SimpleNamespace(
        nn=SimpleNamespace(**found["fairscale.nn"]), optim=SimpleNamespace(**found["fairscale.optim"]), root=None
    )


def model() -> nn.Sequential:
    torch.manual_seed(0)
    # No bias before the batch norm: its gradient is rounding noise, which Adam scales up.
    return nn.Sequential(
        nn.Linear(12, 40, bias=False), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)
    )


def batches(steps: int, parts: int = 1) -> list[list[tuple[Tensor, Tensor]]]:
    """This rank's own samples."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    made = []
    for _ in range(steps):
        inputs = torch.randn(parts * 8, 12, generator=generator)
        targets = torch.randn(parts * 8, 4, generator=generator)
        made.append(list(zip(inputs.split(8), targets.split(8), strict=True)))
    return made


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optim": SGD, "lr": 0.05, "momentum": 0.9},
    "adam": {"optim": Adam, "lr": 1e-2},
    "adamw, clipped, accumulated": {"optim": AdamW, "lr": 1e-2, "weight_decay": 0.1, "clip": 0.2, "parts": 2},
    "fp16 parameters": {"optim": SGD, "lr": 0.05, "broadcast_fp16": True},
    "no buckets, largest norm": {"optim": Adam, "lr": 1e-2, "buffer": 0, "clip": 0.05, "norm": float("inf")},
}


def train_sharded(lib: SimpleNamespace, case: dict[str, Any]) -> tuple[list[float], dict[str, Any], list[float]]:
    """Losses, the whole optimizer state and the parameters after OSS with ShardedDataParallel."""
    options = dict(case)
    clip, norm, parts = options.pop("clip", None), options.pop("norm", 2.0), options.pop("parts", 1)
    buffer = options.pop("buffer", 2**23)
    plain = model()
    decay = [param for param in plain.parameters() if param.dim() > 1]
    rest = [param for param in plain.parameters() if param.dim() <= 1]
    groups = [{"params": decay}, {"params": rest, "lr": options["lr"] / 2}]
    optimizer = lib.optim.OSS(params=groups, **options)
    wrapped = lib.nn.ShardedDataParallel(plain, optimizer, reduce_buffer_size=buffer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
    losses = []
    for passes in batches(STEPS, parts):
        wrapped.zero_grad()
        for index, (inputs, targets) in enumerate(passes):
            with wrapped.no_sync() if index < parts - 1 else nullcontext():
                loss = mse_loss(wrapped(inputs), targets) / parts
                loss.backward()
            losses.append(loss.item())
        if clip is not None:
            losses.append(optimizer.clip_grad_norm(clip, norm).item())
        optimizer.step()
        schedule.step()
    state = optimizer.state_dict(all_ranks=True)
    return losses, state, [param.sum().item() for param in plain.parameters()]


def compare_sharded() -> list[str]:
    """What differs, case by case."""
    wrong = []
    left, right = theirs(), ours()
    for name, case in CASES.items():
        (losses, state, sums), (mine, my_state, my_sums) = train_sharded(left, case), train_sharded(right, case)
        if not torch.allclose(torch.tensor(losses), torch.tensor(mine), atol=1e-5, rtol=1e-5):
            wrong.append(f"{name}: losses {losses} {mine}")
        if not torch.allclose(torch.tensor(sums), torch.tensor(my_sums), atol=1e-4):
            wrong.append(f"{name}: parameters")
        if state["state"].keys() != my_state["state"].keys():
            wrong.append(f"{name}: state of {list(my_state['state'])}, not {list(state['state'])}")
        for index, values in state["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor) and not torch.allclose(value, my_state["state"][index][key], atol=1e-4):
                    wrong.append(f"{name}: state {index} {key}")
        if _partition(left, case) != _partition(right, case):
            wrong.append(f"{name}: partition")
    return wrong


def _partition(lib: SimpleNamespace, case: dict[str, Any]) -> list[list[list[int]]]:
    optimizer = lib.optim.OSS(model().parameters(), optim=case["optim"], lr=case["lr"])
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3))], "lr": 1.0})
    return [
        [[param.numel() for param in group["params"]] for group in groups]
        for groups in optimizer.partition_parameters()
    ]


def compare_gains() -> tuple[list[float], list[float]]:
    def gains(lib: SimpleNamespace) -> list[float]:
        found = []
        for parts, options in ((1, {}), (2, {"num_gradients_to_accumulate": 2, "debias_ewma": False})):
            plain = model()
            wrapped = DistributedDataParallel(plain)
            optimizer = lib.optim.AdaScale(SGD(plain.parameters(), lr=0.05), **options)
            for passes in batches(STEPS, parts):
                optimizer.zero_grad()
                for index, (inputs, targets) in enumerate(passes):
                    with wrapped.no_sync() if index < parts - 1 else nullcontext():
                        loss = mse_loss(wrapped(inputs), targets) / parts
                        loss.backward()
                    found.append(loss.item())
                found.append(optimizer.gain())
                optimizer.step()
            optimizer.set_scale(3.0)
            found += [optimizer.gain(), optimizer.gain(0), optimizer.scale, optimizer.smoothing]
        return found

    return gains(theirs()), gains(ours())


def test_oss_with_sharded_data_parallel(world: World) -> None:
    assert world.run(compare_sharded, timeout_s=60) == [[], []]


def split_model(lib: SimpleNamespace) -> list[Tensor]:
    """Two ranks split a small model; its loss and gradients after STEPS steps."""
    found = lib.model_parallel
    found["initialize"].initialize_model_parallel(2)
    torch.manual_seed(0)
    layers = found["layers"]
    embedding, columns = layers.VocabParallelEmbedding(12, 8), layers.ColumnParallelLinear(8, 16, gather_output=False)
    rows, head = layers.RowParallelLinear(16, 8, input_is_parallel=True), layers.ColumnParallelLinear(8, 12, stride=2)
    other, split = layers.ParallelEmbedding(12, 8), layers.ColumnParallelLinear(8, 12, bias=False, gather_output=False)
    modules = nn.ModuleList([embedding, columns, rows, head, other, split])
    optimizer = SGD(modules.parameters(), lr=0.1)
    tokens = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(1))
    results = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = rows(columns(embedding(tokens) + other(tokens)).relu())
        whole = nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens.flatten())
        loss = whole + found["cross_entropy"].vocab_parallel_cross_entropy(split(hidden), tokens).mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach())
    sizes = [found["initialize"].get_model_parallel_world_size(), found["initialize"].get_data_parallel_world_size()]
    results += [columns.get_master_weight().sum(), rows.get_master_weight().sum(), torch.tensor(sizes).float().sum()]
    found["initialize"].destroy_model_parallel()
    return [one.detach().reshape(()) for one in results]


def compare_split_models() -> tuple[list[float], list[float]]:
    left = theirs()
    parts = ("initialize", "layers", "cross_entropy")
    root = "fairscale.nn.model_parallel"
    left.model_parallel = {part: importlib.import_module(f"{root}.{part}") for part in parts}
    tables = fairscale_modules.namespaces()
    right = SimpleNamespace(model_parallel={part: SimpleNamespace(**tables[f"{root}.{part}"]) for part in parts})
    return torch.stack(split_model(left)).tolist(), torch.stack(split_model(right)).tolist()


def test_split_models(world: World) -> None:
    for left, right in world.run(compare_split_models, timeout_s=60):
        torch.testing.assert_close(torch.tensor(right), torch.tensor(left), rtol=1e-5, atol=1e-5)


def test_adascale(world: World) -> None:
    for left, right in world.run(compare_gains, timeout_s=60):
        wanted, got = torch.tensor([left, right], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def piped(lib: SimpleNamespace, mode: str) -> tuple[list[str], int, float]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    pipe = lib.nn.Pipe(layers, balance=[2, 3], devices=["cpu", "cpu"], chunks=3, checkpoint=mode)
    optimizer = SGD(pipe.parameters(), lr=0.1)
    batch, targets = torch.randn(10, 12), torch.randn(10, 4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse_loss(pipe(batch), targets)
        loss.backward()
        optimizer.step()
    return list(pipe.state_dict()), len(pipe), round(loss.item(), 5)


def test_pipe_and_wrapping_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with warnings.catch_warnings():
        left, right = theirs(), ours()
        for mode in ("always", "except_last", "never"):
            assert piped(right, mode) == piped(left, mode), mode
        _check_decisions(left.nn, right.nn)
    for name in set(sys.modules) - before:
        if name.startswith("fairscale"):
            del sys.modules[name]


class _Marked(nn.Module):
    """A wrapper that counts what it holds."""

    def __init__(self, module: nn.Module, tag: str = "") -> None:
        super().__init__()
        self.inner = module
        self.tag = tag


def _check_decisions(left: Any, right: Any) -> None:
    def wrapped(lib: Any, **options: Any) -> str:
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(10, 10),
            nn.ModuleList([nn.Linear(20, 20), nn.Linear(2, 2)]),
            nn.MultiheadAttention(16, 2),
            nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(12, 12))),
        )
        layers[0].wrapper_config = {"tag": "own"}
        with lib.enable_wrap(wrapper_cls=_Marked, tag="given"):
            made = lib.auto_wrap(layers, **options)
        assert lib.wrap(layers) is layers
        return str([(name, one.tag) for name, one in made.named_modules() if isinstance(one, _Marked)])

    for least in (50, 100, 150, 400, 10_000):
        policies: list[Callable[[Any], Any]] = [
            lambda lib, least=least: functools.partial(lib.default_auto_wrap_policy, min_num_params=least),
            lambda lib, least=least: functools.partial(
                lib.default_auto_wrap_policy,
                min_num_params=least,
                force_leaf_modules={nn.Sequential},
                exclude_wrap_modules={nn.Linear},
                skip_params_check_for_root=True,
            ),
        ]
        for policy in policies:
            assert wrapped(right, auto_wrap_policy=policy(right)) == wrapped(left, auto_wrap_policy=policy(left))
    assert wrapped(right, auto_wrap_policy=right.config_auto_wrap_policy) == wrapped(
        left, auto_wrap_policy=left.config_auto_wrap_policy
    )
