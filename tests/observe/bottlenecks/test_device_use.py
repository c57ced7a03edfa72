"""Memory that is nearly full, and GPUs without work: found in what the devices said, with gains from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.observe.trace.recorded import write_run
from torsh_distributed.cli.trace.trace_commands import bottleneck_lines
from torsh_distributed.observe.bottlenecks.bottleneck import BottleneckType, analyse
from torsh_distributed.observe.bottlenecks.recommendation import recommend


def add_events(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "rank-0.jsonl").open("a") as file:
        for event in events:
            file.write(json.dumps({"time": 1000.0, "rank": 0, **event}) + "\n")


def memory(peak: int, *, device: str = "cuda:0", limit: int = 100) -> dict[str, Any]:
    bytes_now = peak << 29
    return {
        "type": "memory",
        "device": device,
        "allocated_bytes": bytes_now,
        "peak_bytes": bytes_now,
        "limit_bytes": limit << 29,
    }


def test_a_gpu_that_is_nearly_full_is_named(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_events(tmp_path, memory(40), memory(95), memory(99, device="host"))
    (full,) = [one for one in analyse(tmp_path).bottlenecks if one.kind is BottleneckType.MEMORY]
    assert full.evidence == "cuda:0 of rank 0 held up to 47.5 of 50.0 GiB (95%)"


def test_a_gpu_that_is_half_full_is_not(tmp_path: Path) -> None:
    write_run(tmp_path)
    add_events(tmp_path, memory(60), memory(99, device="host"))
    assert BottleneckType.MEMORY not in {one.kind for one in analyse(tmp_path).bottlenecks}


def test_time_without_a_kernel_that_no_wait_explains_is_to_gain(tmp_path: Path) -> None:
    write_run(tmp_path, data_s=0.02, num_passes=4)  # 80 ms a step, 20 of them loading and 10 transferring
    add_events(tmp_path, *({"type": "hardware", "device": "cuda:0", "utilization": 0.3} for _ in range(20)))
    found = analyse(tmp_path)
    (idle,) = [one for one in found.bottlenecks if one.kind is BottleneckType.IDLE_GPU]
    assert idle.seconds == pytest.approx(0.7 * 0.08 - 0.03, rel=0.05)
    (advice,) = [one for one in recommend(found) if "passes" in one.title]
    assert advice.gain_s == idle.seconds
    assert advice.is_bound
    assert advice.overrides == {"TORSH_PLAN__TRAINING__GRADIENT_ACCUMULATION": "2"}


def test_where_memory_is_short_passes_are_not_made_larger(tmp_path: Path) -> None:
    write_run(tmp_path, num_passes=4)
    add_events(tmp_path, memory(95), *({"type": "hardware", "device": "cuda:0", "utilization": 0.3} for _ in range(20)))
    found = analyse(tmp_path)
    assert {BottleneckType.IDLE_GPU, BottleneckType.MEMORY} <= {one.kind for one in found.bottlenecks}
    assert not [one for one in recommend(found) if "passes" in one.title]
    assert "memory: cuda:0 of rank 0 held up to 47.5" in "\n".join(bottleneck_lines(found))


def test_gpus_that_wait_for_data_are_not_idle_of_themselves(tmp_path: Path) -> None:
    write_run(tmp_path, data_s=0.06)
    add_events(tmp_path, *({"type": "hardware", "device": "cuda:0", "utilization": 0.4} for _ in range(20)))
    assert {one.kind for one in analyse(tmp_path).bottlenecks} >= {BottleneckType.IO}
    assert BottleneckType.IDLE_GPU not in {one.kind for one in analyse(tmp_path).bottlenecks}
