"""The monitors of a DeepSpeed config: CSV files, TensorBoard, Weights & Biases, Comet. Rank 0 writes."""

from __future__ import annotations

import csv
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.config.section_models import DeepSpeedMonitorConfig
from torsh_distributed.observe.export.tensorboard_events import event_file_name, scalar_event, write_events

MonitorEvent = tuple[str, Any, int]
"""A name such as `Train/Samples/lr`, a number, and the samples seen so far."""
_JOB = "DeepSpeedJobName"


class RunMonitor(ABC):
    """Writes events somewhere."""

    @abstractmethod
    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        """Write numbers at their sample count."""


class CsvMonitor(RunMonitor):
    """One file for each name: `output_path/job_name/Train_Samples_lr.csv` with the header `step,lr`."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._folder = Path(section.get("output_path") or "csv_monitor") / section.get("job_name", _JOB)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun: set[str] = set()

    @override
    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        for name, value, samples in events:
            stem = name.replace("/", "_").replace(" ", "_")
            with (self._folder / f"{stem}.csv").open("a", newline="") as file:
                writer = csv.writer(file)
                if stem not in self._begun:
                    self._begun.add(stem)
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, float(value)])


class TensorBoardMonitor(RunMonitor):
    """A TensorBoard event file under `output_path/job_name`."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        folder = Path(section.get("output_path") or "runs") / section.get("job_name", _JOB)
        self._path = folder / event_file_name()
        folder.mkdir(parents=True, exist_ok=True)
        self._path.touch()

    @override
    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        with self._path.open("ab") as file:
            write_events(
                file, [scalar_event(time.time(), samples, {name: float(value)}) for name, value, samples in events]
            )


class WandbMonitor(RunMonitor):
    """A run of Weights & Biases."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        wandb = _package("wandb", "wandb")
        self._run: Any = wandb.init(
            project=section.get("project", "deepspeed"), group=section.get("group"), entity=section.get("team")
        )

    @override
    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        for name, value, samples in events:
            self._run.log({name: float(value)}, step=samples)


class CometMonitor(RunMonitor):
    """An experiment of Comet; every `samples_log_interval` samples."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        comet = _package("comet_ml", "comet")
        named = {
            "project": "project",
            "workspace": "workspace",
            "api_key": "api_key",
            "experiment_key": "experiment_key",
        }
        options = {name: section[key] for name, key in named.items() if section.get(key) is not None}
        self._experiment: Any = comet.start(**options, online=section.get("online"), mode=section.get("mode"))
        if section.get("experiment_name"):
            self._experiment.set_name(section["experiment_name"])
        self._interval = int(section.get("samples_log_interval", 100))
        self._last: dict[str, int] = {}

    @override
    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        for name, value, samples in events:
            if samples - self._last.get(name, -self._interval) >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, float(value), step=samples)


_KINDS: dict[str, Callable[[Mapping[str, Any]], RunMonitor]] = {
    "tensorboard": TensorBoardMonitor,
    "csv_monitor": CsvMonitor,
    "wandb": WandbMonitor,
    "comet": CometMonitor,
}


class MonitorMaster:
    """All monitors that a config turns on; `enabled` says whether there is any."""

    def __init__(self, monitor_config: Mapping[str, Any] | DeepSpeedMonitorConfig, *, rank: int | None = None) -> None:
        """`rank`: this process's; scripts leave it out."""
        if isinstance(monitor_config, DeepSpeedMonitorConfig):
            config: Mapping[str, Any] = monitor_config.model_dump()
        else:
            config = monitor_config
        wanted = [name for name in _KINDS if _is_on(config.get(name))]
        self.enabled = bool(wanted)
        writes = (process_group.rank() if rank is None else rank) == 0
        made = {name: _KINDS[name](config[name]) for name in wanted} if writes else {}
        self._monitors = list(made.values())
        self.tb_monitor, self.wandb_monitor = made.get("tensorboard"), made.get("wandb")
        self.csv_monitor, self.comet_monitor = made.get("csv_monitor"), made.get("comet")

    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        """Write numbers; ranks other than 0 write nothing."""
        found = list(events)
        for monitor in self._monitors:
            monitor.write_events(found)


class ScriptMonitor(RunMonitor):
    """One monitor by itself, as scripts make it of its section of a config; rank 0 writes, if the section is on."""

    kind: str

    def __init__(self, config: Any) -> None:
        section: Mapping[str, Any] = config if isinstance(config, Mapping) else config.model_dump()
        self.enabled = _is_on(section)
        self._inner = _KINDS[self.kind](section) if self.enabled and process_group.rank() == 0 else None

    @override
    def write_events(self, events: Iterable[MonitorEvent]) -> None:
        if self._inner is not None:
            self._inner.write_events(events)


def script_monitors() -> dict[str, dict[str, type[ScriptMonitor]]]:
    """By module of `deepspeed.monitor`, its class under DeepSpeed's name."""
    names = {
        "tensorboard": ("tensorboard", "TensorBoardMonitor"),
        "csv_monitor": ("csv_monitor", "csvMonitor"),
        "wandb": ("wandb", "WandbMonitor"),
        "comet": ("comet", "CometMonitor"),
    }
    return {
        f"deepspeed.monitor.{module}": {name: type(name, (ScriptMonitor,), {"kind": kind})}
        for module, (kind, name) in names.items()
    }


def _is_on(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _package(name: str, section: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FeatureNotAvailable(
            f"the section {section} of the config needs the package {name}", hint=f"pip install {name}", feature=name
        ) from error
