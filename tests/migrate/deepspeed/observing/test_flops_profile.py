"""The profiler counts what the arithmetic says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torsh_distributed.migrate.deepspeed.observing.deepspeed_timers import SynchronizedWallClockTimer, ThroughputTimer
from torsh_distributed.migrate.deepspeed.observing.flops_profile import (
    FlopsProfiler,
    duration_to_string,
    flops_to_string,
    get_model_profile,
    macs_to_string,
    params_to_string,
)


def test_flops_and_params_of_linear_layers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    flops, macs, params = get_model_profile(model, (5, 8), print_profile=False, as_string=False)
    assert macs == 5 * (8 * 16 + 16 * 4)
    assert flops == 2 * macs
    assert params == 8 * 16 + 16 + 16 * 4 + 4
    report = tmp_path / "a" / "profile.txt"
    get_model_profile(model, (5, 8), output_file=str(report))
    text = report.read_text()
    assert "DeepSpeed Flops Profiler" in text
    assert "2: 68.00 params, 640.00 FLOPs" in text


def test_the_table_names_the_heaviest_classes_of_each_depth() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(5, 2, 1)]
    model = nn.Sequential(nn.Sequential(*layers), nn.LayerNorm(8))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(1, 5, 8))
    profiler.stop_profile()
    lines = profiler.profile_text(top_modules=1, detailed=False).splitlines()
    deepest = lines[lines.index("depth 2:") :]
    assert deepest[1].split("- ")[1] == "Linear 144.00"  # two of 8 * 8 + 8, where the convolution has 12
    assert deepest[2].split("- ")[1] == "Linear 640.00 MACs"  # two of 5 * 8 * 8
    assert "Conv1d" not in "\n".join(lines)
    both = profiler.profile_text(module_depth=1, top_modules=2, detailed=True)
    assert "depth 2" not in both
    assert "LayerNorm 16.00" in both
    assert "  1: 16.00 params, 0.00 FLOPs, 0.0 %" in both


def test_what_no_profile_is_of_is_refused() -> None:
    with pytest.raises(AssertionError, match="forward or generate"):
        get_model_profile(nn.Linear(4, 4), (1, 4), mode="backward")
    with pytest.raises(AssertionError, match=r"Linear has no generate\(\)"):
        get_model_profile(nn.Linear(4, 4), (1, 4), mode="generate")
    assert flops_to_string(2.5e9) == "2.50 GFLOPS"
    assert flops_to_string(2.5e9, units="MFLOPS", precision=0) == "2500 MFLOPS"
    assert (macs_to_string(7), params_to_string(1500)) == ("7.00 MACs", "1.50 K")
    assert [duration_to_string(one) for one in (2.0, 0.002, 2e-6)] == ["2.00 s", "2.00 ms", "2.00 us"]


def test_a_profile_is_of_one_forward() -> None:
    model = nn.Linear(4, 4)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(2, 4))
    profiler.stop_profile()
    model(torch.ones(2, 4))
    assert profiler.get_total_flops() == 2 * 2 * 16
    assert float(profiler.get_total_duration()) > 0
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_timers_add_up_and_throughput_starts_late() -> None:
    timers = SynchronizedWallClockTimer()
    for _ in range(2):
        timers("fwd").start()
        timers("fwd").stop()
    total = timers("fwd").elapsed(reset=False)
    assert total > 0
    assert timers.get_mean(["fwd", "none"])["fwd"] == total / 2
    assert timers("fwd").elapsed() == 0
    throughput = ThroughputTimer(8)
    for _ in range(2):
        throughput.count(8)
    assert throughput.avg_samples_per_sec() == float("-inf")
    throughput.count(8)
    assert throughput.avg_samples_per_sec() > 0
