"""Exporters by name: `kind:target`, as in `observe.exports` of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.export.experiment_trackers import MlflowTracker, WandbTracker
from torsh_distributed.observe.export.metric_files import CsvMetrics, JsonlMetrics
from torsh_distributed.observe.export.otlp_metrics import OtlpMetrics
from torsh_distributed.observe.export.otlp_traces import OtlpTraces
from torsh_distributed.observe.export.pushgateway import Pushgateway
from torsh_distributed.observe.export.tensorboard_events import TensorBoardEvents

EXPORTERS: Mapping[str, Callable[[str], Exporter]] = {
    "jsonl": JsonlMetrics,
    "csv": CsvMetrics,
    "tensorboard": TensorBoardEvents,
    "otlp": OtlpMetrics,
    "otlp-traces": OtlpTraces,
    "pushgateway": Pushgateway,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
_WITHOUT_TARGET = ("wandb", "mlflow")


def make_exporter(text: str) -> Exporter:
    """The exporter of `kind:target`, such as `csv:metrics.csv` or `otlp:http://localhost:4318`."""
    kind, target = check_export(text)
    return EXPORTERS[kind](target)


def check_export(text: str) -> tuple[str, str]:
    """Kind and target; raises InvalidArgument if there is no such kind, or the target is missing."""
    kind, _, target = text.partition(":")
    if kind not in EXPORTERS or (not target and kind not in _WITHOUT_TARGET):
        raise InvalidArgument(
            "an export is written kind:target",
            hint=f"kinds: {', '.join(EXPORTERS)}; for example csv:metrics.csv or otlp:http://localhost:4318",
            got=text,
        )
    return kind, target
