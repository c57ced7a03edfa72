"""`auto` picks by measurement, alike on all ranks, says why, and looks again when the link changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed import events
from torsh_distributed.compress import GradientCompressor
from torsh_distributed.compress.codec import Averaged, Codec, Key
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.auto import _CHANGED, _WINDOW, AutoCodec
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import CompressionConfig

SIZE = 300_000


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def train(num_steps: int) -> tuple[list[str], list[events.DecisionEvent], float]:
    """The choices, the decisions told of, and how far the sum of all means is from the truth."""
    told: list[events.DecisionEvent] = []
    unsubscribe = events.subscribe(told.append, events.DecisionEvent)
    config = CompressionConfig(method="auto", warmup_steps=0, error_feedback_momentum=1.0)
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


class Paced(Codec):
    """Averages exactly; the time it claims to take is set by the test through the clock that `auto` reads."""

    name = "none"
    is_unbiased = True
    is_deterministic = True

    def encode(self, x: torch.Tensor, key: Key) -> torch.Tensor:
        return x.clone()

    def decode(self, payload: torch.Tensor, num_elements: int, key: Key) -> torch.Tensor:
        return payload

    def payload_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def average(self, x: torch.Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        dist.all_reduce(x, group=group)
        return Averaged(x / group.size(), x, 0)


def watch_a_link_slow_down() -> list[str]:
    """Decide, then let the link seem slower by what was expected of it: the codec must measure again."""
    told: list[events.DecisionEvent] = []
    unsubscribe = events.subscribe(told.append, events.DecisionEvent)
    codec, group = AutoCodec({"none": Paced()}), dist.group.WORLD
    assert group is not None
    for step in range(3):
        codec.average(torch.ones(1000), group, Key(step=step))
    [stream] = codec._streams.values()
    assert stream.choice == "none"
    stream.expected_s /= 1000 * _CHANGED
    for step in range(_WINDOW + 3):
        codec.average(torch.ones(1000), group, Key(step=step))
    unsubscribe()
    return [event.choice for event in told]


def test_a_link_that_changed_is_measured_again(world: World) -> None:
    for choices in world.run(watch_a_link_slow_down):
        assert choices == ["none", "none", "measure again", "none", "none"]


def decide_and_restore() -> tuple[dict[int, str], dict[int, str], dict[int, str]]:
    codecs = [AutoCodec({method: make_codec(method) for method in ("none", "powersgd:4")}) for _ in range(2)]
    group = dist.group.WORLD
    assert group is not None
    for step in range(4):
        codecs[0].average(torch.ones(1000), group, Key(stream=7, step=step))
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
        GradientCompressor(CompressionConfig(method="auto", warmup_steps=0)).compress("weight", torch.ones(5000))
