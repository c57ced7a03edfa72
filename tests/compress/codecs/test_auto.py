"""`auto` picks by measurement, alike on all ranks, says why, and looks again when the link changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed import events
from torsh_distributed.compress import GradientCompressor
from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.auto import _CHANGED, _WINDOW, AutoCodec
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.named_buffers import FlatEntry
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import CompressConfig

SIZE = 300_000


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def train(num_steps: int) -> tuple[list[str], list[events.DecisionEvent], float]:
    """The choices, the decisions told of, and how far the sum of all means is from the truth."""
    told: list[events.DecisionEvent] = []
    unsubscribe = events.subscribe(told.append, events.DecisionEvent)
    config = CompressConfig(method="auto", warmup_steps=0, error_feedback_momentum=1.0)
    compressor = GradientCompressor(config, group=dist.group.WORLD)
    off = torch.zeros(SIZE)
    for step in range(num_steps):
        mine = gradient(dist.get_rank(), step)
        compressor.all_reduce_mean({"weight": mine})
        compressor.step()
        truth = sum(gradient(rank, step) for rank in range(dist.get_world_size())) / dist.get_world_size()
        off += mine - truth
    unsubscribe()
    assert isinstance(compressor.codec, AutoCodec)
    return list(compressor.codec.choices.values()), told, float(off.norm() / SIZE**0.5)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_choose_alike_and_say_why(world: World, backend: str) -> None:
    outcomes = world.run(train, 9, num_ranks=3, backend=backend)
    choices = [choice for choice, _, _ in outcomes]
    assert choices[0] == choices[1] == choices[2]
    assert len(choices[0]) == 1
    for _, told, off in outcomes:
        assert told[0].subject.endswith("what to try")
        assert "MB/s" in told[0].reason
        assert told[-1].choice == choices[0][0]
        assert f"{choices[0][0]} " in told[-1].reason
        assert off < 20, "what is left out of each step is sent later: it does not pile up"


def test_a_slow_link_is_worth_compressing_for(world: World, lab: Lab) -> None:
    hosts = lab.hosts(2)
    for host in hosts:
        host.limit(0.02)
    [[first], _, _], [[second], _, _] = world.run(train, 7, num_ranks=2, backend="gloo", hosts=hosts)
    assert first == second
    assert first in ("topk:0.01", "powersgd:4", "int8"), "1.2 MB at 20 Mbit/s take half a second uncompressed"


def timed(codec: AutoCodec, spent_s: float, num_steps: int, *, stream: int = 0) -> None:
    """Averages that take so long, as whoever times them says."""
    group = dist.group.WORLD
    assert group is not None
    for step in range(num_steps):
        key = Key(step=step, stream=stream)
        codec.average(torch.ones(1000), group, key)
        codec.note(key, spent_s, group)


def watch_a_link_slow_down() -> list[str]:
    told: list[events.DecisionEvent] = []
    unsubscribe = events.subscribe(told.append, events.DecisionEvent)
    codec = AutoCodec({"none": make_codec("none")})
    timed(codec, 0.01, 3)  # measured once, tried twice
    assert codec.choices == {0: "none"}
    timed(codec, 0.004, _WINDOW)  # the least of many trials, not another link
    assert codec.choices == {0: "none"}
    timed(codec, 0.004 * _CHANGED, _WINDOW)
    assert codec.choices == {}
    timed(codec, 0.01, 3)
    unsubscribe()
    return [event.choice for event in told]


def test_a_link_that_changed_is_measured_again(world: World) -> None:
    for choices in world.run(watch_a_link_slow_down):
        assert choices == ["none", "none", "measure again", "none", "none"]


def average_a_bucket(num_steps: int) -> tuple[list[bool], bool]:
    """Where `none` is all there is: whether the means are right at each step, and whether anything is carried over."""
    group = dist.group.WORLD
    assert group is not None
    config = CompressConfig(method="auto", warmup_steps=0)
    compressor = GradientCompressor(config, group=group, codec=AutoCodec({"none": make_codec("none")}))
    are_right = []
    for step in range(num_steps):
        bucket = torch.stack([gradient(rank, step) for rank in range(group.size())])[dist.get_rank()].clone()
        truth = torch.stack([gradient(rank, step) for rank in range(group.size())]).mean(0)
        if step == num_steps - 1:
            bucket[3] = float("nan")
            truth[3] = float("nan")
        tensors = [bucket[: SIZE - 5].view(5, -1), bucket[SIZE - 5 :]]
        average_named(compressor, ["weight", "bias"], tensors, group, bucket=bucket)
        compressor.step()
        are_right.append(torch.allclose(bucket, truth, rtol=1e-5, atol=1e-6, equal_nan=True))
    return are_right, compressor.feedback.carried((FlatEntry("weight", SIZE - 5),), torch.device("cpu")) is not None


def test_a_bucket_that_is_best_left_alone_is_averaged_where_it_lies(world: World) -> None:
    for are_right, is_carried in world.run(average_a_bucket, 6, num_ranks=2, backend="shm"):
        assert all(are_right), "also the last, whose NaN spreads by itself"
        assert not is_carried


def decide_and_restore() -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    codecs = [AutoCodec({method: make_codec(method) for method in ("none", "powersgd:4")}) for _ in range(2)]
    timed(codecs[0], 0.01, 5, stream=7)
    codecs[1].load_state_dict(codecs[0].state_dict())
    restored = codecs[1].choices
    codecs[1].reset()
    return codecs[0].choices, restored, codecs[1].choices


def test_its_choices_survive_a_restart_and_not_a_change_of_members(world: World) -> None:
    for decided, restored, after_reset in world.run(decide_and_restore):
        assert list(decided) == [7]
        assert restored == decided
        assert after_reset == {}


def test_it_has_no_messages_by_hand() -> None:
    with pytest.raises(InvalidArgument, match="measures the link"):
        GradientCompressor(CompressConfig(method="auto", warmup_steps=0)).compress("weight", torch.ones(5000))
