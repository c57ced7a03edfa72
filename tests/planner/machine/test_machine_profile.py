"""Machines by description: every number is marked, contradictions are refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.observe.loops.counted_operations import PEAK_FLOPS
from torsh_distributed.planner.machine.machine_profile import described_machines, machine_named, read_machine
from torsh_distributed.planner.machine.this_machine import this_machine

GOOD = described_machines()["h100"].read_text()


@pytest.mark.parametrize("name", described_machines())
def test_every_description_is_marked_and_agrees_with_the_table_of_peaks(name: str) -> None:
    machine = machine_named(name)
    assert len(machine.not_measured("bf16")) == 6
    assert machine.flops["bf16"].value in PEAK_FLOPS.values()


def test_an_unknown_machine_gets_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match=r"no description of a machine h10(.|\n)*did you mean h100"):
        machine_named("h10")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("memory_gb = 80", "memory_gb = -1", r"device.memory_gb is -1, not a number above 0"),
        ("memory_gb = 80", "memroy_gb = 80", "device.memroy_gb is not known"),
        ("bf16 = 989", "", "tflops.bf16 is missing"),
        ("gb_per_s = 50", "gb_per_s = 5000", r"far.gb_per_s 5000 is above near.gb_per_s 450"),
        ("[near]", "[nearby]", r"there is no \[near\]"),
        ("[near]", "[near", "does not describe|TOML"),
        ("[near]", "[flops]\nbf16 = 1\n[near]", r"\[flops\] is not known .*did you mean tflops"),
    ],
)
def test_a_contradictory_description_is_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD.replace(before, after))
    with pytest.raises(ConfigurationError, match=message):
        read_machine(path)


def test_a_description_may_say_what_is_different_from_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[device]\nname = "ours"\nlike = "h100"\n[far]\ngb_per_s = 12.5\n')
    mine, whole = read_machine(path), machine_named("h100")
    assert (mine.name, mine.far.bytes_per_s.value) == ("ours", 12.5e9)
    assert mine.far.latency_s.value == whole.far.latency_s.value
    assert (mine.memory_bytes, mine.flops["bf16"].value) == (whole.memory_bytes, whole.flops["bf16"].value)
    path.write_text('[device]\nlike = "h10"\n')
    with pytest.raises(InvalidArgument, match="did you mean h100"):
        read_machine(path)
    path.write_text('[device]\nlike = "h100"\n[far]\ngb_per_s = 5000\n')
    with pytest.raises(ConfigurationError, match=r"far.gb_per_s 5000 is above"):
        read_machine(path)


def test_this_machine_is_measured_and_its_links_are_marked() -> None:
    machine = this_machine(2)
    assert machine.flops["fp32"].is_measured
    assert machine.memory_rate.is_measured
    assert machine.memory_rate.value > 1e8
    assert not machine.near.bytes_per_s.is_measured
    assert "spread" in machine.memory_rate.source
