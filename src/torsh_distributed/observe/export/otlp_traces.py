"""Spans for OpenTelemetry over OTLP: the job, its steps by rank, their parts, checkpoints."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from typing_extensions import override

from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.export.otlp_metrics import SCOPE, TIMEOUT_S, job_resource, send, signal_url
from torsh_distributed.observe.job.job_view import JobHeader, JobView, hex_digest
from torsh_distributed.observe.job.rank_view import RankView
from torsh_distributed.observe.metrics.step_record import PARTS, StepRecord

_MAX_WAITING = 4096
_SPANS_A_REQUEST = 1000


class OtlpTraces(Exporter):
    """Posts to `endpoint`/v1/traces every ten seconds; the span of the job itself comes when it has ended.

    Every step of every rank is a span with its parts as attributes; the step that the page shows as a timeline has its
    phases and waits below it. Of more than 4096 steps between two posts the oldest are left out, and counted.
    """

    interval_s = 10.0

    def __init__(self, endpoint: str) -> None:
        self._exporter = OTLPSpanExporter(endpoint=signal_url(endpoint, "traces"), timeout=TIMEOUT_S)
        self._waiting: deque[tuple[int, StepRecord]] = deque(maxlen=_MAX_WAITING)
        self._num_left_out = 0
        self._view: JobView | None = None
        self._drawn_s: dict[int, float] = {}
        self._last_told: dict[str, Any] | None = None

    @override
    def export(self, view: JobView) -> None:
        self._send(self._take_spans(view))

    @override
    def close(self, view: JobView) -> None:
        spans = self._take_spans(view)
        header = view.header
        spans.append(
            _span(
                header,
                _job_span_id(header),
                None,
                f"job {header.run_id}",
                start=header.started,
                end=header.ended or header.started,
                failed=header.exit_code not in (0, None),
                attributes={
                    "torsh.command": header.command,
                    "torsh.state": header.state,
                    "torsh.restarts": header.attempt,
                    "torsh.steps_left_out": self._num_left_out,
                },
            )
        )
        self._send(spans)

    def _take_step(self, rank: int, step: StepRecord) -> None:
        self._num_left_out += len(self._waiting) == _MAX_WAITING
        self._waiting.append((rank, step))

    def _take_spans(self, view: JobView) -> list[ReadableSpan]:
        with view.lock:
            if self._view is None:
                self._view = view
                view.is_traced = True
                view.step_listeners.append(self._take_step)
                for rank, one in sorted(view.ranks.items()):  # what came before the first export
                    for step in one.steps:
                        self._take_step(rank, step)
            header = view.header
            spans = [_step_span(header, *self._waiting.popleft()) for _ in range(len(self._waiting))]
            for _, one in sorted(view.ranks.items()):
                spans += self._timeline_spans(header, one)
            return [*spans, *self._incident_spans(view)]

    def _timeline_spans(self, header: JobHeader, rank: RankView) -> Iterator[ReadableSpan]:
        if not rank.timeline or not rank.steps or self._drawn_s.get(rank.rank) == rank.timeline[0][1]:
            return
        self._drawn_s[rank.rank] = rank.timeline[0][1]
        parent = header.step_span_id(rank.rank, rank.timeline_step)
        for number, (name, start, seconds) in enumerate(rank.timeline):
            own = hex_digest(8, parent, number)
            yield _span(
                header, own, parent, name, start=start, end=start + seconds, attributes={"torsh.rank": rank.rank}
            )

    def _incident_spans(self, view: JobView) -> list[ReadableSpan]:
        new: list[dict[str, Any]] = []
        for one in reversed(view.incidents):  # by their order, as the clocks of ranks differ
            if one is self._last_told:
                break
            new.append(one)
        self._last_told = new[0] if new else self._last_told
        return [_incident_span(view.header, number, one) for number, one in enumerate(reversed(new))]

    def _send(self, spans: list[ReadableSpan]) -> None:
        for first in range(0, len(spans), _SPANS_A_REQUEST):
            send(self._exporter, spans[first : first + _SPANS_A_REQUEST])


def _step_span(header: JobHeader, rank: int, step: StepRecord) -> ReadableSpan:
    parts = {f"torsh.{part}_s": seconds for part in PARTS if (seconds := getattr(step, f"{part}_s")) is not None}
    told = {"torsh.loss": step.loss, "torsh.num_samples": step.num_samples}
    return _span(
        header,
        header.step_span_id(rank, step.step),
        _job_span_id(header),
        f"step {step.step}",
        start=step.time - step.step_s,
        end=step.time,
        failed=step.is_skipped,
        attributes={"torsh.rank": rank, "torsh.step": step.step, **parts}
        | {name: value for name, value in told.items() if value is not None},
    )


def _incident_span(header: JobHeader, number: int, incident: Mapping[str, Any]) -> ReadableSpan:
    took_s = incident.get("duration_s")
    seconds = float(took_s) if isinstance(took_s, int | float) else 0.0
    told = {f"torsh.{name}": value for name, value in incident.items() if name not in ("time", "type")}
    return _span(
        header,
        hex_digest(8, header.trace_id, incident["type"], incident["time"], number),
        _job_span_id(header),
        " ".join([incident["type"], str(incident.get("action") or "")]).strip(),
        start=incident["time"] - seconds,
        end=incident["time"],
        failed=incident.get("error") is not None,
        attributes={name: value for name, value in told.items() if value is not None},
    )


def _span(
    header: JobHeader,
    own: str,
    parent: str | None,
    name: str,
    *,
    start: float,
    end: float,
    attributes: Mapping[str, Any],
    failed: bool = False,
) -> ReadableSpan:
    start_ns, end_ns = round(start * 1e9), round(max(start, end) * 1e9)
    return ReadableSpan(
        name=name,
        context=_context(header, own),
        parent=None if parent is None else _context(header, parent),
        resource=job_resource(header.run_id),
        instrumentation_scope=SCOPE,
        start_time=start_ns,
        end_time=end_ns,
        attributes={
            key: value if isinstance(value, bool | int | float) else str(value) for key, value in attributes.items()
        },
        status=Status(StatusCode.ERROR if failed else StatusCode.UNSET),
    )


def _context(header: JobHeader, span_id: str) -> SpanContext:
    return SpanContext(
        int(header.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
    )


def _job_span_id(job: JobHeader) -> str:
    return hex_digest(8, job.trace_id, "job")
