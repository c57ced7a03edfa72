"""Spans for OpenTelemetry over OTLP/HTTP in its JSON form: the job, its steps by rank, their parts, checkpoints."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from torsh_distributed.observe.export.base import Exporter
from torsh_distributed.observe.export.otlp_metrics import http_url, otlp_attributes, post_json
from torsh_distributed.observe.job.job_view import JobHeader, JobView
from torsh_distributed.observe.job.rank_view import RankView
from torsh_distributed.observe.metrics.step_record import PARTS, StepRecord

_MAX_WAITING = 4096
_SPANS_A_REQUEST = 1000
_INTERNAL, _FAILED = 1, 2


def trace_id(job: JobHeader) -> str:
    """The trace of a job: 32 hexadecimal digits."""
    return _digest(16, job.run_id, job.started)


def step_span_id(job: JobHeader, rank: int, step: int) -> str:
    """The span of a rank's step: 16 hexadecimal digits."""
    return _digest(8, job.run_id, job.started, job.attempt, rank, step)


class OtlpTraces(Exporter):
    """Posts to `endpoint`/v1/traces every ten seconds; the span of the job itself comes when it has ended.

    Every step of every rank is a span with its parts as attributes; the step that the page shows as a timeline has its
    phases and waits below it. Of more than 4096 steps between two posts the oldest are left out, and counted.
    """

    interval_s = 10.0

    def __init__(self, endpoint: str) -> None:
        self._url = http_url(endpoint).rstrip("/")
        if not self._url.endswith("/v1/traces"):
            self._url += "/v1/traces"
        self._waiting: deque[tuple[int, StepRecord]] = deque(maxlen=_MAX_WAITING)
        self._num_left_out = 0
        self._view: JobView | None = None
        self._drawn_s: dict[int, float] = {}
        self._last_told: dict[str, Any] | None = None

    @override
    def export(self, view: JobView) -> None:
        self._send(view, self._take_spans(view))

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
        self._send(view, spans)

    def _take_step(self, rank: int, step: StepRecord) -> None:
        self._num_left_out += len(self._waiting) == _MAX_WAITING
        self._waiting.append((rank, step))

    def _take_spans(self, view: JobView) -> list[dict[str, Any]]:
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

    def _timeline_spans(self, header: JobHeader, rank: RankView) -> Iterator[dict[str, Any]]:
        if not rank.timeline or not rank.steps or self._drawn_s.get(rank.rank) == rank.timeline[0][1]:
            return
        self._drawn_s[rank.rank] = rank.timeline[0][1]
        parent = step_span_id(header, rank.rank, rank.timeline_step)
        for number, (name, start, seconds) in enumerate(rank.timeline):
            own = _digest(8, parent, number)
            yield _span(
                header, own, parent, name, start=start, end=start + seconds, attributes={"torsh.rank": rank.rank}
            )

    def _incident_spans(self, view: JobView) -> list[dict[str, Any]]:
        new: list[dict[str, Any]] = []
        for one in reversed(view.incidents):  # by their order, as the clocks of ranks differ
            if one is self._last_told:
                break
            new.append(one)
        self._last_told = new[0] if new else self._last_told
        return [_incident_span(view.header, number, one) for number, one in enumerate(reversed(new))]

    def _send(self, view: JobView, spans: list[dict[str, Any]]) -> None:
        resource = {"service.name": "torsh", "torsh.run_id": view.header.run_id}
        for first in range(0, len(spans), _SPANS_A_REQUEST):
            scope = {"scope": {"name": "torsh_distributed"}, "spans": spans[first : first + _SPANS_A_REQUEST]}
            traced = {"resource": {"attributes": otlp_attributes(resource)}, "scopeSpans": [scope]}
            post_json(self._url, {"resourceSpans": [traced]})


def _step_span(header: JobHeader, rank: int, step: StepRecord) -> dict[str, Any]:
    parts = {f"torsh.{part}_s": seconds for part in PARTS if (seconds := getattr(step, f"{part}_s")) is not None}
    told = {"torsh.loss": step.loss, "torsh.num_samples": step.num_samples}
    return _span(
        header,
        step_span_id(header, rank, step.step),
        _job_span_id(header),
        f"step {step.step}",
        start=step.time - step.step_s,
        end=step.time,
        failed=step.is_skipped,
        attributes={"torsh.rank": rank, "torsh.step": step.step, **parts}
        | {name: value for name, value in told.items() if value is not None},
    )


def _incident_span(header: JobHeader, number: int, incident: Mapping[str, Any]) -> dict[str, Any]:
    took_s = incident.get("duration_s")
    seconds = float(took_s) if isinstance(took_s, int | float) else 0.0
    told = {f"torsh.{name}": value for name, value in incident.items() if name not in ("time", "type")}
    return _span(
        header,
        _digest(8, trace_id(header), incident["type"], incident["time"], number),
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
) -> dict[str, Any]:
    span = {
        "traceId": trace_id(header),
        "spanId": own,
        "name": name,
        "kind": _INTERNAL,
        "startTimeUnixNano": str(round(start * 1e9)),
        "endTimeUnixNano": str(round(max(start, end) * 1e9)),
        "attributes": otlp_attributes(attributes),
        "status": {"code": _FAILED} if failed else {},
    }
    return span if parent is None else {**span, "parentSpanId": parent}


def _job_span_id(job: JobHeader) -> str:
    return _digest(8, trace_id(job), "job")


def _digest(num_bytes: int, *parts: object) -> str:
    text = "\0".join(map(str, parts)).encode()
    return hashlib.blake2b(text, digest_size=num_bytes).hexdigest()
