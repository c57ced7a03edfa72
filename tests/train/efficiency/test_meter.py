"""The report of real ranks: its parts add up, operations and bytes are those that travelled, a slow axis is named."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from tests.parallel.reference import BATCH, batches, build
from torsh_distributed import events
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe import process_metrics, start_reporting, stop_reporting
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.plan import DistributedConfig, MeshConfig, PipelineConfig, Plan, TrainingConfig
from torsh_distributed.train import EfficiencyMeter, EfficiencyReport, Engine, parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

STEPS, PAUSE_S = 3, 0.25


def engine_of(mesh: MeshConfig, **sections: Any) -> Engine:
    plan = Plan(mesh=mesh, training=TrainingConfig(steps=100, batch_size=BATCH), **sections)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return parallelize(build("gpt", num_layers=2), optimizer, plan, loss_fn=next_character_loss)


def measured(engine: Engine) -> EfficiencyReport:
    batch = iter(engine.batches(batches(STEPS + 2)))
    for _ in range(2):  # in the second, DDP packs its buckets again
        engine.step(next(batch))
    with EfficiencyMeter(engine) as meter:
        for _ in range(STEPS):
            engine.step(next(batch))
    assert not events.wanted(events.WaitEvent), "nothing is timed once the meter is gone"
    report = meter.report()
    assert report.num_steps == STEPS
    for rank in report.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s, rel=1e-6)
        assert min(rank.parts.values()) >= -1e-9
    return report


LAYOUTS: dict[str, tuple[MeshConfig, dict[str, Any]]] = {
    "dp": (MeshConfig(dp=4), {}),
    "shard": (MeshConfig(dp=2, shard=2), {}),
    "tp": (MeshConfig(dp=2, tp=2), {}),
    "pp": (MeshConfig(dp=2, pp=2), {"pipeline": PipelineConfig(num_microbatches=2)}),
}


def count(layout: str) -> tuple[dict[str, Any], int]:
    """Runs on four ranks: the report of a layout as plain numbers, and the bytes of all gradients."""
    mesh, sections = LAYOUTS[layout]
    report = measured(engine_of(mesh, **sections)).to_dict()
    return report, sum(param.numel() * 4 for param in build("gpt", num_layers=2).parameters())


def check_replicas(report: dict[str, Any], whole: int) -> None:
    dp = report["mean"]["axes"]
    assert set(dp) == {"dp"}
    assert dp["dp"]["num_bytes"] == whole + 4 + 8, "every gradient once, the loss, and what it counts"


def check_shards(report: dict[str, Any], whole: int) -> None:
    shard = report["mean"]["axes"]
    assert set(shard) == {"dp", "shard", "dp×shard"}
    # Shards lie in memory that the ranks share, but for uneven ones, which are gathered for forward and for backward.
    # Gradients are scattered, their shards averaged over replicas.
    assert whole < shard["shard"]["num_bytes"] < 1.2 * whole
    assert shard["dp"]["num_bytes"] == pytest.approx(whole / 2, rel=0.1)


def check_split_layers(report: dict[str, Any], whole: int) -> None:
    tp = report["mean"]["axes"]
    assert tp["tp"]["num_operations"] >= 4 * 2, "two layers, two sums each, forward and backward"
    assert tp["dp"]["num_bytes"] < whole
    assert all(rank["bubble_s"] == 0 for rank in report["ranks"])


def check_stages(report: dict[str, Any], whole: int) -> None:
    for rank in report["ranks"]:
        assert rank["axes"]["pp"]["num_operations"] == 2 * 2 + 1, "activations, their gradients, and the loss"
        assert rank["bubble_s"] > 0


@pytest.mark.parametrize(
    ("layout", "check"),
    [
        pytest.param("dp", check_replicas, marks=pytest.mark.matrix),
        ("shard", check_shards),
        pytest.param("tp", check_split_layers, marks=pytest.mark.matrix),
        ("pp", check_stages),
    ],
)
def test_operations_and_bytes_are_those_of_each_layout(
    world: World, layout: str, check: Callable[[dict[str, Any], int], None]
) -> None:
    report, whole = world.run(count, layout, num_ranks=4, backend="torsh", timeout_s=60)[0]
    check(report, whole)


def check_shards_on_gloo(report: dict[str, Any], whole: int) -> None:
    shard = report["mean"]["axes"]
    assert set(shard) == {"dp", "shard", "dp×shard"}
    # Nothing is shared here: all is gathered for forward, all but the root for backward, and gradients are scattered.
    assert 2 * whole < shard["shard"]["num_bytes"] < 3.1 * whole
    assert shard["dp"]["num_bytes"] == pytest.approx(whole / 2, rel=0.1)
    assert shard["shard"]["wait_s"] > 0


@pytest.mark.parametrize(
    ("layout", "check"),
    [("dp", check_replicas), ("shard", check_shards_on_gloo), ("tp", check_split_layers), ("pp", check_stages)],
)
def test_operations_and_bytes_are_seen_on_gloo_too(
    world: World, layout: str, check: Callable[[dict[str, Any], int], None]
) -> None:
    report, whole = world.run(count, layout, num_ranks=4, backend="gloo", timeout_s=90)[0]
    check(report, whole)


class Slow(nn.Module):
    """Holds up this rank in every forward, if it is to be slow."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.is_slow = inner, False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.is_slow:
            time.sleep(PAUSE_S)
        out: torch.Tensor = self.inner(tokens)
        return out


def measure_slow() -> dict[str, list[dict[str, float]]]:
    """Runs on four ranks, dp 2 × tp 2, those at the far end of an axis being slow: seconds of each rank by axis."""
    mesh = MeshConfig(dp=2, tp=2)
    place = MeshLayout(mesh).coordinates(dist.get_rank())
    model = Slow(build("gpt", num_layers=2))
    plan = Plan(mesh=mesh, training=TrainingConfig(steps=100, batch_size=BATCH))
    engine = parallelize(model, partial(torch.optim.SGD, lr=0.01), plan, loss_fn=next_character_loss)
    found = {}
    for axis in ("tp", "dp"):
        model.is_slow = place[axis] == 1
        found[axis] = [{name: time.wait_s for name, time in rank.axes.items()} for rank in measured(engine).ranks]
    return found


@pytest.mark.matrix
def test_slow_ranks_are_waited_for_along_their_axis_alone(world: World) -> None:
    layout = MeshLayout(MeshConfig(dp=2, tp=2))
    found = world.run(measure_slow, num_ranks=4, backend="torsh", timeout_s=90)[0]
    for axis, other in (("tp", "dp"), ("dp", "tp")):
        mean = {
            (where, is_slow): fmean(
                waits[where]
                for rank, waits in enumerate(found[axis])
                if (layout.coordinates(rank)[axis] == 1) == is_slow
            )
            for where in (axis, other)
            for is_slow in (False, True)
        }
        # What the machine's other load costs is waited for by all alike.
        assert mean[axis, False] - mean[axis, True] > 0.7 * PAUSE_S
        assert abs(mean[other, False] - mean[other, True]) < 0.3 * PAUSE_S


RATE_GBPS = 0.003


def measure_limited() -> tuple[float, float]:
    """Seconds a step waits for dp, and those that its gradients take at the rate they are held to."""
    report = measured(engine_of(MeshConfig(dp=2), distributed=DistributedConfig(rate_limit_gbps=RATE_GBPS)))
    [axis] = report.mean.axes.values()
    return axis.wait_s, axis.num_bytes * 8 / (RATE_GBPS * 1e9)


def test_gradients_that_travel_in_another_thread_are_waited_for_in_this_one(world: World) -> None:
    for wait_s, travel_s in world.run(measure_limited, num_ranks=2, backend="torsh", timeout_s=60):
        assert travel_s > 0.2
        assert wait_s > 0.3 * travel_s, "backward is over long before they are there"


def measure_nothing() -> None:
    with EfficiencyMeter(engine_of(MeshConfig())) as meter:
        pass
    with pytest.raises(InvalidArgument, match="no step was measured"):
        meter.report()


def test_what_cannot_be_measured_is_refused(world: World) -> None:
    world.run(measure_nothing, num_ranks=1, backend="gloo")


def report_axes() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The metrics of a rank that reports while it is metered, and what the meter says of the same steps."""
    reporter = start_reporting(lambda packet: True, interval_s=600)
    try:
        engine = engine_of(MeshConfig(dp=2, tp=2))
        batch = iter(engine.batches(batches(STEPS + 1)))
        engine.step(next(batch))
        reporter.report()
        before = dict(process_metrics().values())
        with EfficiencyMeter(engine) as meter:
            for _ in range(STEPS):
                engine.step(next(batch))
        reporter.report()
        axes = meter.report().to_dict()["ranks"][dist.get_rank()]["axes"]
        names = {name: value for name, value in process_metrics().values().items() if name.startswith("torsh_axis")}
        counted = {
            name: (value or 0) - (before.get(name) or 0)
            for name, value in names.items()
            if not name.startswith("torsh_axis_trend")
        }
        latency = process_metrics()("torsh_axis_seconds", "tp").statistics()
        assert latency is not None
        assert 0 < latency.median <= latency.p99
        return counted, axes
    finally:
        stop_reporting()


def test_a_rank_that_reports_tells_each_axis_as_the_meter_does(world: World) -> None:
    for counted, axes in world.run(report_axes, num_ranks=4, backend="shm", timeout_s=60):
        for axis in ("dp", "tp"):
            for name in ("operations", "bytes"):  # the meter's are means, which thirds round
                expected = STEPS * axes[axis][f"num_{name}"]
                assert counted[f'torsh_axis_{name}{{axis="{axis}"}}'] == pytest.approx(expected, rel=1e-9)
            waited_s = counted[f'torsh_axis_wait_seconds{{axis="{axis}"}}']
            assert waited_s == pytest.approx(STEPS * axes[axis]["wait_s"], rel=0.5, abs=0.05)
