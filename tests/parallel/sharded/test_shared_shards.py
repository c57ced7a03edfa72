"""Shards in memory that ranks share: the results of one process, nothing gathered, and nobody reads too late."""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from tests.bed.world import World
from tests.parallel.example_models import backward
from torsh_distributed.comm.backends.shm.segment import SharedSegment
from torsh_distributed.errors import BackendError, InvalidArgument, MemoryAllocationFailed
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded import communication
from torsh_distributed.parallel.sharded import module as sharded_module
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.plan import FsdpConfig, MeshConfig
from torsh_distributed.plan.sections.training import PrecisionConfig

WIDTH = 12
STEPS = 3
STALL_S = 0.2


class Stall(nn.Module):
    """Passes its input on; ranks take their time over it, in forward and in backward."""

    def __init__(self, longest_s: float) -> None:
        super().__init__()
        self.longest_s = longest_s
        self._random = random.Random(os.getpid())

    def _sleep(self, *_: object) -> None:
        time.sleep(self._random.uniform(0, self.longest_s))

    @override
    def forward(self, x: Tensor) -> Tensor:
        self._sleep()
        if x.requires_grad:
            x.register_hook(self._sleep)  # type: ignore[no-untyped-call]  # untyped in torch
        return x


class Mixed(nn.Module):
    """Even and uneven parameters, a single number, frozen ones, one of another dtype, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.narrow = nn.Linear(WIDTH, 7)
        self.widen = nn.Linear(7, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.stall = Stall(0.004)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.table(ids)
        for layer in self.layers:
            hidden = self.stall(hidden + torch.tanh(layer(hidden)))
        hidden = hidden + self.gain * self.widen(self.narrow(hidden * self.scale))
        logits: Tensor = self.head(self.stall(hidden))
        return logits


def batches(num_ranks: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(STEPS):
        ids = torch.randint(2 * WIDTH, (12,), generator=generator)
        yield ids.chunk(num_ranks)[rank], (ids * 5 % (2 * WIDTH)).chunk(num_ranks)[rank]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_ranks: int, rank: int) -> None:
    for ids, targets in batches(num_ranks, rank):
        optimizer.zero_grad()
        backward(nn.functional.cross_entropy(model(ids), targets))
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def num_shared(model: nn.Module) -> int:
    """Parameters that FSDP2 finds in shared memory; the model is sharded at the moment."""
    return sum(hasattr(one._local_tensor, "fsdp_pre_all_gather") for one in params_of(model))


def params_of(model: nn.Module) -> list[DTensor]:
    return [param for param in model.parameters() if isinstance(param, DTensor)]


@contextmanager
def without_sharing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_module, "share_shards", lambda *_, **__: False)
        yield


def build(config: FsdpConfig, *, is_shared: bool, **options: Any) -> FullyShardedDataParallel:
    if is_shared:
        return FullyShardedDataParallel(Mixed(), config, **options)
    with without_sharing():
        return FullyShardedDataParallel(Mixed(), config, **options)


def trained(config: FsdpConfig, *, is_shared: bool, **options: Any) -> tuple[int, dict[str, Tensor]]:
    """How many parameters were shared, and the model after some steps."""
    model = build(config, is_shared=is_shared, **options)
    optimizer = adam(model)
    model.attach(optimizer)
    train(model, optimizer, dist.get_world_size(), dist.get_rank())
    return num_shared(model), model.full_state_dict()


def trained_alone() -> dict[str, Tensor]:
    model = Mixed()
    train(model, adam(model), 1, 0)
    return model.state_dict()


CONFIGS = [
    FsdpConfig(strategy="full_shard"),
    FsdpConfig(strategy="shard_grad_op"),
    FsdpConfig(strategy="full_shard", forward_prefetch=True, max_gathered_ahead=2),
]
Trained = tuple[int, dict[str, Tensor]]


def train_both_ways() -> list[tuple[Trained, Trained]]:
    return [(trained(config, is_shared=True), trained(config, is_shared=False)) for config in CONFIGS]


def check_trained(pairs: list[tuple[Trained, Trained]]) -> None:
    expected = trained_alone()
    for (num_parts, state), (num_others, plain) in pairs:
        # Table, three weights and biases, the other dtype and what widens; seven rows do not divide.
        assert (num_parts, num_others) == (10, 0)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(state[name], plain[name]), name


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_training_is_that_of_one_process_and_bit_for_bit_that_without_sharing(world: World, num_ranks: int) -> None:
    for pairs in world.run(train_both_ways, num_ranks=num_ranks, backend="torsh", timeout_s=60):
        check_trained(pairs)


def square() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


def written_by_the_others(model: FullyShardedDataParallel, group: dist.ProcessGroup) -> list[float]:
    """What this rank reads in forward of what every rank of the group writes there, by rank."""
    seen: list[float] = []
    mine = params_of(model)[0].to_local().detach()

    def write_and_read(module: nn.Module, *_: object) -> None:
        mine.fill_(dist.get_rank() + 1)
        dist.barrier(group)
        assert isinstance(module.weight, Tensor)
        assert not isinstance(module.weight, DTensor)
        seen.extend(float(rows.mean()) for rows in module.weight.detach().chunk(group.size()))

    hook = model.module.get_submodule("1").register_forward_hook(
        write_and_read,
        prepend=True,  # after it the piece is sharded again
    )
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    hook.remove()
    model.reshard()
    return seen


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """Bytes that this rank gives to each gather."""
    found: list[int] = []

    def gather(output: Tensor, part: Tensor, **options: Any) -> Any:
        found.append(part.nbytes)
        return original(output, part, **options)

    original = communication.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communication, "gather", gather)
        yield found


def what_is_shared() -> tuple[list[float], list[int], int, int]:
    group = dist.group.WORLD
    assert group is not None
    model = FullyShardedDataParallel(square())
    with gathered_bytes() as sizes:
        model(torch.ones(1, WIDTH)).sum().backward()
    stats = model.memory_stats()
    return written_by_the_others(model, group), sizes, stats.param_bytes, stats.whole_param_bytes


def test_the_whole_parameter_is_one_memory_and_only_a_number_travels(world: World) -> None:
    for seen, sizes, held_bytes, whole_bytes in world.run(what_is_shared, backend="shm"):
        assert seen == [1.0, 2.0]
        assert sizes
        assert set(sizes) == {4}
        assert whole_bytes == 2 * WIDTH * WIDTH * 4
        assert held_bytes == whole_bytes / 2


def writes_after_forward(*, is_training: bool, meets: bool) -> bool:
    """Whether the slow rank computed with what was there when it began, though the fast one has written since."""
    model = FullyShardedDataParallel(square(), FsdpConfig(wrap="none"))
    if not meets:
        model.module._forward_hooks.popitem()
    x = torch.ones(1, WIDTH)
    with torch.set_grad_enabled(is_training):
        expected = model(x).detach().clone()
        model.reshard()
        if dist.get_rank() == 1:
            slow = model.module.get_submodule("0")
            slow.register_forward_hook(lambda *_: time.sleep(STALL_S))
        found = model(x).detach()
    if dist.get_rank() == 0:
        model.reshard()
        for param in params_of(model):
            param.to_local().detach().zero_()
    return torch.equal(found, expected)


def write_early() -> list[bool]:
    return [
        writes_after_forward(is_training=is_training, meets=meets)
        for is_training in (False, True)
        for meets in (True, False)
    ]


def test_who_returns_from_forward_may_write_though_others_are_slow(world: World) -> None:
    """With and without gradients; and the test can tell: without the meeting the slow rank sees the new values."""
    fast, slow = world.run(write_early, backend="torsh")
    assert fast == [True, True, True, True]
    assert slow == [True, False, True, False]


def choices() -> list[int]:
    """How many parameters are shared, by what is asked for; each of these trains."""
    found = []
    options: list[tuple[FsdpConfig, PrecisionConfig | None]] = [
        (FsdpConfig(), None),
        (FsdpConfig(), PrecisionConfig(dtype="bf16")),
        (FsdpConfig(gather_codec="bf16"), None),
    ]
    for config, precision in options:
        model = FullyShardedDataParallel(square(), config, precision=precision)
        optimizer = adam(model)
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        found.append(num_shared(model))
    return found


def test_what_is_gathered_in_another_form_is_not_shared(world: World) -> None:
    assert world.run(choices, backend="torsh") == [[2, 0, 0]] * 2


def choices_on_gloo() -> int:
    return num_shared(FullyShardedDataParallel(square()))


def test_other_backends_gather_as_before(world: World) -> None:
    assert world.run(choices_on_gloo, backend="gloo") == [0, 0]


def replicas_of_shards() -> tuple[list[float], tuple[Trained, Trained]]:
    mesh = Mesh(MeshConfig(dp=2, shard=2))
    model = FullyShardedDataParallel(square(), FsdpConfig(strategy="hybrid_shard"), mesh=mesh)
    seen = written_by_the_others(model, mesh.group("shard"))
    config = FsdpConfig(strategy="hybrid_shard")
    return seen, (trained(config, is_shared=True, mesh=mesh), trained(config, is_shared=False, mesh=mesh))


def test_each_replica_of_shards_has_its_own_memory(world: World) -> None:
    results = world.run(replicas_of_shards, num_ranks=4, backend="torsh", timeout_s=60)
    assert [seen for seen, _ in results] == [[1.0, 2.0]] * 2 + [[3.0, 4.0]] * 2
    check_trained([pair for _, pair in results])


def no_memory(*_: object, **__: object) -> NoReturn:
    raise MemoryAllocationFailed("there is no memory for a shared segment: by order of the test", hint="none")


def no_access(*_: object, **__: object) -> NoReturn:
    raise BackendError("rank 0's shared memory cannot be opened: by order of the test", hint="none", backend="shm")


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def train_where_memory_fails() -> list[tuple[list[str], Trained]]:
    faults: list[tuple[int, str, Callable[..., NoReturn]]] = [(0, "create", no_memory), (1, "open", no_access)]
    found = []
    for rank, name, fails in faults:
        lines = Lines()
        logger = logging.getLogger("torsh_distributed.comm.shared_memory.buffers")
        logger.addHandler(lines)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(SharedSegment, name, fails)
            found.append((lines.texts, trained(FsdpConfig(), is_shared=True)))
        logger.removeHandler(lines)
    return found


def test_without_memory_to_share_training_goes_on_and_says_why(world: World) -> None:
    expected = trained_alone()
    for cases in world.run(train_where_memory_fails, backend="torsh", timeout_s=60):
        for (texts, (num_parts, state)), reason in zip(cases, ("there is no memory", "cannot be opened"), strict=True):
            assert len(texts) == 1
            assert texts[0].startswith("WARNING: the ranks of this node cannot share memory for parameters: ")
            assert reason in texts[0]
            assert num_parts == 0
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False), len(file.getvalue())


def known() -> nn.Sequential:
    model = square()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape))
    return model


def output(model: nn.Module) -> Tensor:
    """What the model gives after one step; shards are shards again then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        found: Tensor = model(torch.ones(1, WIDTH)).clone()
    if isinstance(model, FullyShardedDataParallel):
        model.reshard()
    return found


def ways_of_state(has_run: bool) -> dict[str, Tensor]:
    """The output after a state came in each of these ways; all must give the same."""
    whole = known().state_dict()

    def fresh() -> FullyShardedDataParallel:
        model = FullyShardedDataParallel(square())
        if has_run:
            output(model)
        return model

    donor = fresh()
    donor.load_full_state_dict(whole)
    kept = {name: value.clone() for name, value in donor.sharded_state_dict().items()}
    loaded, num_bytes = saved(donor.sharded_state_dict())
    as_vars, _ = saved(donor.module.state_dict(keep_vars=True))
    assert num_bytes < 20_000
    found = {}
    for name, state in (("copies", kept), ("saved", loaded), ("saved parameters", as_vars)):
        for is_assigned in (False, True):
            model = fresh()
            model.module.load_state_dict(state, assign=is_assigned)
            found[f"{name}, {is_assigned=}"] = output(model)
            assert num_shared(model) == 2
    converted = fresh()
    converted.load_full_state_dict(whole)
    converted.to("cpu").float()
    found["converted"] = output(converted)
    found["whole"] = output(donor)
    read = donor.full_state_dict()
    again = fresh()
    again.load_full_state_dict(read)
    for name, value in again.full_state_dict().items():
        assert torch.equal(value, read[name])
    return found


def all_ways_of_state() -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    early, late = ways_of_state(False), ways_of_state(True)
    model = FullyShardedDataParallel(square()).double()
    model(torch.ones(1, WIDTH).double())  # FSDP2 takes it up at the first forward, without sharing
    model = FullyShardedDataParallel(square())
    output(model)
    with pytest.raises(InvalidArgument) as refusal:
        model.double()(torch.ones(1, WIDTH).double())
    return early, late, str(refusal.value)


def test_state_goes_out_and_comes_in_by_every_way_before_and_after_the_first_forward(world: World) -> None:
    expected = output(known())
    for early, late, refusal in world.run(all_ways_of_state, backend="torsh", timeout_s=60):
        for way, found in [*early.items(), *late.items()]:
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4), way
        assert "cannot change its dtype or shape after the first forward: weight" in refusal
        assert "torch.float64" in refusal


def compiled() -> tuple[Tensor, Tensor]:
    model, other = FullyShardedDataParallel(square()), FullyShardedDataParallel(square())
    whole: Any = torch.compile(model, backend="eager")
    return output(whole), output(other)


def test_the_compiler_leaves_the_meeting_alone(world: World) -> None:
    for found, expected in world.run(compiled, backend="torsh", timeout_s=60):
        assert torch.equal(found, expected)


def held() -> tuple[int, int]:
    """Open files, and mappings of shared memory, of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("torsh-shm" in line for line in maps)


def held_around_a_model() -> list[tuple[int, int]]:
    def use() -> tuple[int, int]:
        model = FullyShardedDataParallel(square())
        output(model)
        return held()

    use()  # what comes up once: the buffers of the group
    before = held()
    during = use()
    return [before, during, held()]


def test_files_and_mappings_go_with_the_model(world: World) -> None:
    for before, during, after in world.run(held_around_a_model, backend="torsh"):
        assert during == (before[0] + 1, before[1] + 1), "one piece of memory for all parameters"
        assert after == before
