"""What compression costs: measured on ranks, kept, and part of a predicted step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.planner.live_memory import wide
from torsh_distributed.plan import CompressConfig, Plan
from torsh_distributed.planner.machine.codec_rates import codec_rate, measure_codecs, travel_s
from torsh_distributed.planner.machine.machine_profile import MachineProfile, machine_named
from torsh_distributed.planner.machine.measured_rates import CodecRate, SizeTable
from torsh_distributed.planner.machine.measuring import OperationTimer
from torsh_distributed.planner.machine.step_time import StepPredictor, StepTime
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.model.profiling import profile_model

LINE = SizeTable((1e3, 1e6), (1e-6, 1e-3))
INT8 = CodecRate(travels="exchanged", share=0.25, encode=LINE, decode=LINE, average=None)
SPARSE = CodecRate(travels="gathered", share=0.01, encode=LINE, decode=LINE, average=None)
FAST = CodecRate(
    travels="summed", share=0.5, encode=SizeTable((1.0,), (1e-12,)), decode=SizeTable((1.0,), (1e-12,)), average=None
)


def test_what_a_rank_computes_depends_on_how_messages_travel() -> None:
    assert INT8.busy_s(1e6, 8) == pytest.approx(3e-3)
    assert SPARSE.busy_s(1e6, 8) == pytest.approx(9e-3)


def test_messages_take_what_was_measured_and_else_what_their_bytes_take() -> None:
    link = machine_named("h100").far
    assert travel_s(INT8, 1e6, 4, link) == link.ring_s(0.25e6, 4, laps=2)
    assert travel_s(SPARSE, 1e6, 4, link) == link.ring_s(4 * 0.01e6, 4, laps=1)
    measured = dataclasses.replace(INT8, average=SizeTable((1e6,), (5e-3,)))
    known = dataclasses.replace(link, tables={4: {"all_reduce": LINE}})
    assert travel_s(measured, 1e6, 4, known) == pytest.approx(2e-3)
    assert travel_s(measured, 1e6, 2, known) == link.ring_s(0.25e6, 2, laps=2)


def test_a_number_that_was_not_measured_takes_the_rate_of_its_method_and_auto_the_best() -> None:
    link, rates = machine_named("h100").far, {"int8": INT8, "topk": SPARSE, "bf16": INT8}
    assert codec_rate(CompressConfig(method="topk:0.05"), rates, 4, link) is SPARSE
    assert codec_rate(CompressConfig(), rates, 4, link) is None
    assert codec_rate(CompressConfig(method="sign"), rates, 4, link) is None
    assert codec_rate(CompressConfig(method="auto"), rates, 4, link) is None, "whole gradients are sooner there"
    assert codec_rate(CompressConfig(method="auto"), {**rates, "bf16": FAST}, 4, link) is FAST


def predicted(machine: MachineProfile, **compress: object) -> StepTime:
    plan = Plan(dp=4, training={"batch_size": 16}, compress=compress).resolve(4)
    return StepPredictor(profile_model(wide(), plan), machine, optimizer_named("AdamW")).step_time(plan)


def test_a_plan_that_compresses_sends_less_and_computes_more() -> None:
    machine = dataclasses.replace(machine_named("h100"), codecs={"int8": INT8})
    slow = dataclasses.replace(machine, near=dataclasses.replace(machine.far, latency_s=machine.near.latency_s))
    plain, packed = predicted(slow), predicted(slow, method="int8")
    assert packed.terms["averaging"] < plain.terms["averaging"]
    assert packed.terms["compressing"] > 0
    assert "compressing" not in plain.terms
    every_second = predicted(slow, method="int8", period=2)
    assert every_second.terms["compressing"] == pytest.approx(packed.terms["compressing"] / 2)


def test_a_method_that_was_not_measured_is_named() -> None:
    told = predicted(machine_named("h100"), method="int8").not_measured
    assert any("compress.method int8, counted as without: torsh bench machine" in one for one in told)
    other = dataclasses.replace(machine_named("h100"), codecs={"int8": INT8})
    assert any("compress.method sign" in one for one in predicted(other, method="sign").not_measured)


def measured_here() -> dict[str, CodecRate]:
    """Runs on every rank."""
    return measure_codecs(OperationTimer(torch.device("cpu"), meet=dist.barrier), ("int8", "topk:0.01", "powersgd"))


@pytest.mark.ranks
def test_methods_are_measured_on_all_ranks(world: World) -> None:
    for found in world.run(measured_here, num_ranks=2):
        assert [one.travels for one in found.values()] == ["exchanged", "gathered", "summed"]
        assert found["int8"].share == pytest.approx(0.254, abs=0.005)
        assert all(one.average is not None and min(one.average.seconds) > 0 for one in found.values())
