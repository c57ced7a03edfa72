"""Monitors write what DeepSpeed's write, where it writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.observing.run_monitors import MonitorMaster


def test_csv_has_one_file_for_each_name(tmp_path: Path) -> None:
    master = MonitorMaster({"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "j"}}, rank=0)
    assert master.enabled
    master.write_events([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 2.0, 8)])
    master.write_events([("Train/Samples/lr", 0.25, 16)])
    assert (tmp_path / "j" / "Train_Samples_lr.csv").read_text().split() == ["step,lr", "8,0.5", "16,0.25"]
    assert (tmp_path / "j" / "Train_Samples_train_loss.csv").read_text().split() == ["step,train_loss", "8,2.0"]


@pytest.mark.needs_library("tensorboard")
def test_only_rank_0_writes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"tensorboard": {"enabled": True, "output_path": str(tmp_path)}}
    MonitorMaster(config, rank=1).write_events([("Train/Samples/lr", 0.5, 8)])
    assert list(tmp_path.iterdir()) == []
    master = MonitorMaster(config, rank=0)
    master.write_events([("Train/Samples/lr", 0.5, 8)])
    master.write_events([("Train/Samples/lr", 0.25, 16)])
    found = EventAccumulator(str(tmp_path / "DeepSpeedJobName")).Reload().Scalars("Train/Samples/lr")
    assert [(event.step, event.value) for event in found] == [(8, 0.5), (16, 0.25)]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(FeatureNotAvailable, match="comet_ml"):
        MonitorMaster({"comet": {"enabled": True}}, rank=0)
    assert not MonitorMaster({"wandb": {"enabled": False}}, rank=0).enabled


def test_each_monitor_has_its_name_on_the_rank_that_writes(tmp_path: Path) -> None:
    config = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    master, other = MonitorMaster(config, rank=0), MonitorMaster(config, rank=1)
    assert master.csv_monitor is not None
    master.csv_monitor.write_events([("Train/loss", 0.5, 8)])
    assert list(tmp_path.rglob("Train_loss.csv"))
    assert (master.tb_monitor, master.wandb_monitor, master.comet_monitor, other.csv_monitor) == (None,) * 4
