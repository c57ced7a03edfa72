"""Writers for experiment trackers: Weights & Biases and MLflow, by their own packages."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from typing_extensions import override

from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.job.job_view import JobView


class ExperimentTracker(Exporter):
    """Logs every new step of the job's curve, and the newest numbers of the first rank with the last of them."""

    def __init__(self) -> None:
        self._last_step = -1

    @override
    def export(self, view: JobView) -> None:
        with view.lock:
            points = [point for point in view.curve.points() if point.step > self._last_step]
            first = view.ranks[min(view.ranks)] if view.ranks else None
            names = [] if first is None else [name for name, labels in first.names() if not labels]
            newest = {} if first is None else {name: first.number(name) for name in names}
        for point in points:
            scalars = {"loss": point.loss, "step_seconds": point.step_s, "samples_per_second": point.samples_per_s}
            if point is points[-1]:
                scalars.update(newest)
            self._log({name: value for name, value in scalars.items() if value is not None}, point.step)
            self._last_step = point.step

    @abstractmethod
    def _log(self, scalars: dict[str, float], step: int) -> None:
        """Log values of a step."""


class WandbTracker(ExperimentTracker):
    """A run of Weights & Biases in the project `target`. WANDB_MODE=offline keeps it on disk."""

    def __init__(self, target: str) -> None:
        super().__init__()
        import wandb

        self._run: Any = wandb.init(project=target or "torsh")

    @override
    def _log(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(scalars, step=step)

    @override
    def close(self, view: JobView) -> None:
        super().close(view)
        self._run.finish(exit_code=view.header.exit_code or 0)


class MlflowTracker(ExperimentTracker):
    """A run of MLflow at the tracking address `target`, or where MLFLOW_TRACKING_URI says."""

    def __init__(self, target: str) -> None:
        super().__init__()
        import mlflow

        self._mlflow: Any = mlflow
        if target:
            mlflow.set_tracking_uri(target)
        self._run: Any = mlflow.start_run()

    @override
    def _log(self, scalars: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(scalars, step=step)

    @override
    def close(self, view: JobView) -> None:
        super().close(view)
        self._mlflow.end_run("FINISHED" if view.header.exit_code == 0 else "FAILED")
