"""Updates that the ranks of a node divide: bit for bit those of one rank, and a replica stays its own rank's."""

from __future__ import annotations

import gc
import io
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.optim import Adam

from tests.bed.world import World
from torsh_distributed.comm.backends.shm.segment import SharedSegment
from torsh_distributed.errors import InvalidArgument, MemoryAllocationFailed, ProcessFailure
from torsh_distributed.parallel import optim
from torsh_distributed.parallel.optim import CpuAdam, _part
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos import gpt, moe

pytestmark = pytest.mark.skipif(
    optim.compiled_kernel() is None, reason="the kernel is not compiled: no C compiler was found at install"
)

SHAPES = ((3, 7), (), (1,), (129,), (0, 4), (70, 61))
STALL_S = 0.3
SETTINGS: list[dict[str, Any]] = [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}]


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def divided(params: list[nn.Parameter], **settings: Any) -> CpuAdam:
    optimizer = CpuAdam(params, lr=0.05, **settings)
    assert optimizer.divide(params, everyone())
    return optimizer


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    """Gradients are equal on all ranks; in each step one parameter has none."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for index, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if index == number % len(params) else gradient
        optimizer.step()


def assert_same(ours: CpuAdam, others: torch.optim.Optimizer) -> None:
    """Values and state, bit by bit."""
    for one, other in zip(ours.param_groups[0]["params"], others.param_groups[0]["params"], strict=True):
        assert torch.equal(one, other)
        assert ours.state[one].keys() == others.state[other].keys()
        for name, value in ours.state[one].items():
            assert torch.equal(value, others.state[other][name]), name


# ---- the same as alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 129, 4270])
def test_the_parts_of_all_ranks_are_the_whole(num_ranks: int, numel: int) -> None:
    parts = [_part(numel, rank, num_ranks) for rank in range(num_ranks)]
    assert [index for part in parts for index in range(numel)[part]] == list(range(numel))
    assert all(part.start % 16 == 0 for part in parts)


def train_divided() -> None:
    for settings in SETTINGS:
        ours, others = parameters(), parameters()
        optimizer, alone = divided(ours, **settings), CpuAdam(others, lr=0.05, **settings)
        train(optimizer, ours, range(8))
        train(alone, others, range(8))
        assert_same(optimizer, alone)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_updates_are_bit_for_bit_those_of_a_rank_alone(world: World, num_ranks: int) -> None:
    world.run(train_divided, num_ranks=num_ranks, backend="shm")


def which_did_what() -> list[int]:
    """Elements that this rank updates of a parameter, and of one that was added later."""
    params = [nn.Parameter(torch.ones(64, 4)), nn.Parameter(torch.ones(10))]
    optimizer = divided(params[:1])
    optimizer.add_param_group({"params": params[1:]})
    for param in params:
        param.grad = torch.ones_like(param)
    counts: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "_by_kernel", lambda _, __, pieces, *___: counts.extend(p.numel() for p in pieces))
        optimizer.step()
    return counts


def test_each_rank_does_its_part_alone_and_what_came_later_whole(world: World) -> None:
    assert world.run(which_did_what, backend="torsh") == [[128, 10]] * 2


def engine_of(sections: dict[str, Any], optimizer: type[Adam] = CpuAdam) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
    return parallelize(
        model, optimizer(model.parameters(), lr=0.05), Plan.from_dict(sections), loss_fn=functional.mse_loss
    )


def losses_of(optimizer: type[Adam], sections: dict[str, Any], resume_at: int) -> list[float]:
    """Of twelve steps, cut in two by a new Engine that goes on from the first one's state."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    losses, state = [], None
    for num_steps in (resume_at, 12 - resume_at):
        engine = engine_of(sections, optimizer)
        if state is not None:
            engine.load_state_dict(state)
        mine = next(iter(engine.batches([batch])))
        losses += [engine.step(mine) for _ in range(num_steps)]
        state = saved(engine.state_dict())[0]
    if dist.get_world_size() > 1 and sections["mesh"] == {"dp": -1}:
        assert engine.optimizer._divided is not None
    return losses


PLANS: list[dict[str, Any]] = [
    {"mesh": {"dp": -1}, "training": {"gradient_clipping": 0.5}},
    {"mesh": {"dp": -1}, "training": {"gradient_accumulation": 2}, "compress": {"method": "fp16"}},
    {"mesh": {"dp": 1, "shard": -1}, "fsdp": {"strategy": "shard_optimizer"}},
]


def losses_of_plans(optimizer: type[Adam]) -> list[list[float]]:
    return [losses_of(optimizer, sections, resume_at=5) for sections in PLANS]


def test_the_engine_divides_and_trains_as_one_process(world: World) -> None:
    (alone,) = world.run(losses_of_plans, Adam, num_ranks=1)
    for num_ranks in (2, 4):
        for found in world.run(losses_of_plans, CpuAdam, num_ranks=num_ranks, backend="torsh", timeout_s=60):
            for losses, expected, tolerance in zip(found, alone, (1e-5, 5e-3, 1e-5), strict=True):
                assert losses == pytest.approx(expected, rel=tolerance)


def train_experts(optimizer: type[Adam], sections: dict[str, Any]) -> list[float]:
    torch.manual_seed(3)
    plan = Plan.from_dict({**sections, "expert": {"num_experts": 4}})
    model = moe.with_experts(gpt.CharGPT(12, width=16, num_layers=2, num_heads=2), plan.expert)
    engine = parallelize(model, optimizer(model.parameters(), lr=3e-3), plan, loss_fn=gpt.next_character_loss)
    ids = torch.randint(12, (8, 9), generator=torch.Generator().manual_seed(2))
    mine = next(iter(engine.batches([(ids[:, :-1], ids[:, 1:])])))
    return [engine.step(mine) for _ in range(4)]


def test_experts_which_differ_between_ranks_are_left_alone(world: World) -> None:
    expected = world.run(train_experts, Adam, {"mesh": {"ep": 2}}, backend="torsh")
    found = world.run(train_experts, CpuAdam, {"mesh": {"ep": 2}}, backend="torsh")
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


# ---- what it does to a replica ----------------------------------------------------------------------------------


def change_own_replica() -> None:
    params = [nn.Parameter(torch.zeros(40))]
    optimizer = divided(params)
    with torch.no_grad():
        params[0].fill_(dist.get_rank())
    dist.barrier()
    assert params[0].unique().tolist() == [dist.get_rank()]
    with torch.no_grad():
        params[0].fill_(0.5)
    params[0].grad = torch.ones(40)
    optimizer.step()
    assert params[0].unique().tolist() == pytest.approx([0.45])


def test_a_replica_is_its_ranks_own(world: World) -> None:
    world.run(change_own_replica, num_ranks=3, backend="shm")


def read_until_late() -> None:
    """The last rank still reads while the others are in the next update."""
    params = [nn.Parameter(torch.ones(5000))]
    optimizer = divided(params)
    for number in range(3):
        params[0].grad = torch.ones_like(params[0])
        before = params[0].detach().clone()
        if dist.get_rank() == number % dist.get_world_size():
            time.sleep(STALL_S)
        assert torch.equal(params[0], before), "another rank has written already"
        optimizer.step()
        values = params[0].unique()
        assert len(values) == 1, "another rank had not written yet"


def test_nobody_writes_while_another_reads(world: World) -> None:
    world.run(read_until_late, num_ranks=2, backend="torsh")


def give_other_memory() -> None:
    ours, others = parameters(), parameters()
    optimizer, alone = divided(ours), CpuAdam(others, lr=0.05)
    train(optimizer, ours, range(4))
    train(alone, others, range(4))
    for param in ours:
        param.data = param.data.clone()
    loaded, num_bytes = saved(alone.state_dict())
    assert num_bytes < 80_000
    optimizer.load_state_dict(loaded)
    train(optimizer, ours, range(4, 8))
    train(alone, others, range(4, 8))
    assert_same(optimizer, alone)
    kept, num_bytes = saved(optimizer.state_dict())
    assert num_bytes < 80_000, "a saved tensor brings no more than itself"
    alone.load_state_dict(kept)
    assert_same(optimizer, alone)
    ours[0].data = ours[0].data.double()
    with pytest.raises(InvalidArgument, match="cannot change its shape, dtype or device"):
        optimizer.step()


def saved(value: Any) -> tuple[Any, int]:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False), len(file.getvalue())


def test_values_and_state_come_home_from_other_memory(world: World) -> None:
    world.run(give_other_memory, num_ranks=3, backend="shm")


# ---- where it is not possible -----------------------------------------------------------------------------------


def odd_parameters() -> list[nn.Parameter]:
    """One that can be divided, and: two in the same memory, one that is not contiguous, one that is frozen."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 40, generator=generator)
    turned = torch.randn(6, 4, generator=generator).t()
    tensors = torch.randn(40, generator=generator), both[0], both[1], turned
    params = [nn.Parameter(tensor) for tensor in tensors]
    return [*params, nn.Parameter(torch.ones(3), requires_grad=False)]


def divide_odd_ones() -> None:
    ours, others = odd_parameters(), odd_parameters()
    optimizer, alone = divided(ours), CpuAdam(others, lr=0.05)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        for one, other in zip(ours[:4], others[:4], strict=True):
            gradient = torch.randn(one.shape, generator=generator)
            # As a view of something larger: not contiguous either.
            one.grad = gradient.repeat_interleave(2, dim=-1)[..., ::2]
            other.grad = gradient.clone()
        optimizer.step()
        alone.step()
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(ours[0], others[0])
    assert ours[1].untyped_storage().data_ptr() == ours[2].untyped_storage().data_ptr()
    assert not ours[3].is_contiguous()


def test_what_cannot_be_divided_is_updated_by_every_rank(world: World) -> None:
    world.run(divide_odd_ones, backend="shm")


def no_memory(*_: object, **__: object) -> NoReturn:
    raise MemoryAllocationFailed("there is no memory for a shared segment: by order of the test", hint="none")


def divide_without_memory() -> list[bool]:
    params = parameters()
    optimizer = CpuAdam(params, lr=0.05)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(SharedSegment, "create", no_memory)
        answers = [optimizer.divide(params, everyone())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "compiled_kernel", lambda: None)
        answers.append(optimizer.divide(params, everyone()))
    train(optimizer, params, range(2))
    return answers


def test_without_memory_or_kernel_every_rank_updates_all(world: World) -> None:
    assert world.run(divide_without_memory, backend="shm") == [[False, False]] * 2


def divide_on_gloo() -> bool:
    params = parameters()
    return CpuAdam(params).divide(params, everyone())


def test_ranks_without_common_memory_do_not_divide(world: World) -> None:
    assert world.run(divide_on_gloo, backend="gloo") == [False, False]
    assert world.run(divide_on_gloo, backend="shm", num_ranks=1) == [False]


def die_in_update() -> tuple[int, list[str]]:
    params = [nn.Parameter(torch.ones(5000))]
    optimizer = divided(params)
    params[0].grad = torch.ones_like(params[0])
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(optim, "_by_kernel", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(ProcessFailure) as caught:
            optimizer.step()
    return caught.value.context["failed_rank"], caught.value.__notes__


def test_survivors_of_a_rank_that_dies_in_an_update_learn_what_it_means(world: World) -> None:
    outcomes = world.outcomes(die_in_update, num_ranks=3, backend="shm")
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        failed, notes = outcomes[rank].value
        assert failed == 1
        assert "resume from a checkpoint" in notes[0]


def num_mappings() -> int:
    return sum("torsh-shm" in line for line in Path("/proc/self/maps").read_text().splitlines())


def make_and_forget() -> tuple[int, int, int]:
    before = num_mappings()
    engine = engine_of({"mesh": {"dp": -1}})
    engine.step((torch.ones(2, 5), torch.ones(2, 3)))
    during = num_mappings()
    del engine
    gc.collect()
    return before, during, num_mappings()


def test_the_memory_goes_with_the_engine(world: World) -> None:
    for before, during, after in world.run(make_and_forget, backend="shm"):
        assert during > before
        assert after == before
