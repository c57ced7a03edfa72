"""Exporters by name: `kind:target`, as in `observe.exports` of a plan. Each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from torsh_distributed import upward
from torsh_distributed.errors import InvalidArgument, missing_extra
from torsh_distributed.observe.export.base import Exporter

_HOME = "torsh_distributed.observe.export"
EXPORTERS = {
    "jsonl": (f"{_HOME}.metric_files:JsonlMetrics", None),
    "csv": (f"{_HOME}.metric_files:CsvMetrics", None),
    "tensorboard": (f"{_HOME}.tensorboard_events:TensorBoardEvents", "tensorboard"),
    "otlp": (f"{_HOME}.otlp_metrics:OtlpMetrics", "otlp"),
    "otlp-traces": (f"{_HOME}.otlp_traces:OtlpTraces", "otlp"),
    "pushgateway": (f"{_HOME}.pushgateway:Pushgateway", None),
    "wandb": (f"{_HOME}.experiment_trackers:WandbTracker", "wandb"),
    "mlflow": (f"{_HOME}.experiment_trackers:MlflowTracker", "mlflow"),
    "energy": (upward.ENERGY_REPORT, None),
}
"""Kind to `module:class` and the extra that it needs."""
_WITHOUT_TARGET = ("wandb", "mlflow")


def make_exporter(text: str) -> Exporter:
    """The exporter of `kind:target`, such as `csv:metrics.csv` or `otlp:http://localhost:4318`.

    Raises FeatureNotAvailable with the `pip install` line if its package is missing.
    """
    kind, target = check_export(text)
    place, extra = EXPORTERS[kind]
    try:
        make: Callable[[str], Exporter] = upward.load(place)
        return make(target)
    except ImportError as error:
        if extra is None:
            raise
        raise missing_extra(extra, f"the export {kind}") from error


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
