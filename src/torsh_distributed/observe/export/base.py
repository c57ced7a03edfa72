"""The interface of an exporter, and the values that it exports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.observe.job.job_view import JobView, is_of_node
from torsh_distributed.observe.job.rank_view import Value
from torsh_distributed.observe.metrics.catalogue import MetricDefinition


@dataclass(frozen=True, slots=True)
class ExportedValue:
    """One value with all its labels."""

    definition: MetricDefinition
    labels: Mapping[str, str]
    value: Value


class Exporter(ABC):
    """Sends the job's metrics somewhere. Called from one thread; may block for some seconds and may raise OSError.

    Whoever calls it reports an error once and goes on: an export never ends a job.
    """

    interval_s: float = 5.0
    """Seconds between two calls of `export`."""

    @abstractmethod
    def export(self, view: JobView) -> None:
        """Send what is new."""

    def close(self, view: JobView) -> None:
        """The job has ended: send the rest."""
        self.export(view)


def http_url(text: str) -> str:
    """`text` if it is an http or https address; anything else would be opened as a file or another protocol."""
    if not text.startswith(("http://", "https://")):
        raise InvalidArgument(
            "the address must begin with http:// or https://", hint="such as http://localhost:4318", got=text
        )
    return text


def exported_values(view: JobView, names: Container[str] | None = None) -> list[ExportedValue]:
    """The values of the job now, all or of some metrics: of ranks with the label `rank`, of machines with `node`."""
    with view.lock:
        return list(_values(view, names))


def _values(view: JobView, names: Container[str] | None) -> Iterator[ExportedValue]:
    definitions = view.definitions()
    for rank_view, (name, labels), value in view.values(names):
        definition = definitions[name]
        own = dict(zip(definition.labels, labels, strict=True))
        place = (
            {"node": str(rank_view.facts.get("node", ""))} if is_of_node(definition) else {"rank": str(rank_view.rank)}
        )
        yield ExportedValue(definition, {**place, **own}, value)
    for (name, labels), number in view.job_values().items():
        if names is not None and name not in names:
            continue
        definition = definitions[name]
        yield ExportedValue(definition, dict(zip(definition.labels, labels, strict=True)), number)
