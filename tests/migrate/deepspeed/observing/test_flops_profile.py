"""The profiler counts what the arithmetic says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from torsh_distributed.migrate.deepspeed.observing.deepspeed_timers import SynchronizedWallClockTimer, ThroughputTimer
from torsh_distributed.migrate.deepspeed.observing.flops_profile import FlopsProfiler, get_model_profile


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
    assert "2: 640.00 FLOPs" in text


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
