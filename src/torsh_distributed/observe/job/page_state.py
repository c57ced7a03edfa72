"""The state of a job as the page, `torsh top` and the report show it: plain JSON, bounded in size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torsh_distributed.observe.analytics import training_course
from torsh_distributed.observe.bottlenecks.live_analysis import advice_rows
from torsh_distributed.observe.job.job_view import JobView
from torsh_distributed.observe.job.rank_view import DistributionSummary, RankView, newest_of
from torsh_distributed.observe.metrics.catalogue import CATALOGUE, CUSTOM_PREFIX, MetricScope
from torsh_distributed.observe.metrics.step_record import PARTS, StepRecord
from torsh_distributed.observe.training_risks import training_risks

MAX_TIMELINE_RANKS = 16
_NEWEST_STEPS = 20
_ADVICE_AGE_S = 5.0
_SILENT_S = 10.0
_SHOWN_INCIDENTS = 100
_SHOWN_RISKS = 20
_SHOWN_RISK = 0.5
"""Below the alarm: whoever looks sees it rise."""
_WAITS = ("wait", "bubble", "data")
_BUSY = ("forward", "backward", "optimizer", "other")
_OPERATION_METRICS = frozenset(name for name in CATALOGUE if name.startswith("torsh_collective"))
_RATE_METRICS = {
    f"torsh_{topic}_{name}": (kind, unit, what)
    for topic, kind, unit in (
        ("axis", "axis", "bytes"),
        ("compression", "codec", "bytes"),
        ("routing", "gate", "tokens"),
    )
    for name, what in (
        ("seconds", "latency"),
        (f"{unit}_per_second", "rate"),
        ("trend_ratio", "trend"),
        ("size_ratio", "size"),
    )
    if f"torsh_{topic}_{name}" in CATALOGUE
}
"""By metric: what it is about, in what its throughput is counted, and what it says."""
_NODE_METRICS = frozenset(name for name, one in CATALOGUE.items() if one.scope is MetricScope.NODE)


def page_state(
    view: JobView,
    *,
    alerts: Sequence[Mapping[str, Any]] = (),
    anomalies: Sequence[Mapping[str, Any]] = (),
    now_s: float | None = None,
) -> dict[str, Any]:
    """Everything that is shown now."""
    with view.lock:
        now_s = time.monotonic() if now_s is None else now_s
        # Of many ranks fewer steps each: the mean over all of them needs no more.
        window = max(5, min(_NEWEST_STEPS, 2560 // max(1, len(view.ranks))))
        ranks = [
            _rank_row(rank, now_s, window, has_ended=view.header.ended is not None)
            for _, rank in sorted(view.ranks.items())
        ]
        return {
            "time": time.time(),
            "job": _job_row(view),
            "ranks": ranks,
            "curve": _curve(view),
            "parts": _mean_of_parts([rank["parts"] for rank in ranks]),
            "operations": _operations(view),
            "rates": _rates(view),
            "timeline": _timeline(view),
            "nodes": _nodes(view),
            "custom": _custom(view),
            "mesh": next((rank.facts["mesh"] for rank in view.ranks.values() if "mesh" in rank.facts), None),
            "stragglers": [
                {"rank": one.rank, "since_step": one.since_step, "slowdown": one.slowdown}
                for one in view.stragglers.stragglers
            ],
            "rank_risks": [
                {"rank": one.rank, "score": one.score, "reason": one.reason, "detail": one.detail}
                for one in view.risks.newest()[:_SHOWN_RISKS]
                if one.score >= _SHOWN_RISK
            ],
            "incidents": list(view.incidents)[-_SHOWN_INCIDENTS:],
            "checkpoints": [one for one in view.incidents if one["type"] == "checkpoint"][-20:],
            **view.derived("advice", advice_rows, max_age_s=_ADVICE_AGE_S),
            "energy": _energy(view),
            "federated": view.federated.summary(),
            "course": view.derived("course", lambda one: training_course(one).to_dict(), max_age_s=_ADVICE_AGE_S),
            "risks": view.derived("risks", lambda one: training_risks(one).to_dict(), max_age_s=_ADVICE_AGE_S),
            "alerts": list(alerts),
            "anomalies": list(anomalies),
            "dropped": view.num_dropped,
        }


def _job_row(view: JobView) -> dict[str, Any]:
    header = view.header
    facts: dict[str, Any] = next((rank.facts for _, rank in sorted(view.ranks.items())), {})
    ended = header.ended or time.time()
    newest = next(iter(view.curve.points()[-1:]), None)
    evaluated = next(iter(view.evaluations.points()[-1:]), None)
    step = view.newest_step
    gpus = [value for _, _, value in view.values({"torsh_gpu_utilization_ratio"}) if isinstance(value, float)]
    return {
        "run_id": header.run_id,
        "command": header.command,
        "state": header.state,
        "world_size": header.world_size or header.num_workers or facts.get("world_size") or len(view.ranks),
        "num_nodes": header.num_nodes,
        "attempt": header.attempt,
        "exit_code": header.exit_code,
        "started": header.started,
        "age_s": ended - header.started,
        "backend": facts.get("backend"),
        "epoch": max(view.series("torsh_epoch").values(), default=None),
        "step": step.step if step else None,
        "planned_steps": view.total_steps,
        "remaining_s": view.remaining_s,
        "loss": newest.loss if newest else None,
        "validation_loss": evaluated.loss if evaluated else None,
        "gpu_utilization": _mean(gpus),
        "samples_per_s": newest.samples_per_s if newest else None,
        "last_step_age_s": time.time() - step.time if step and header.ended is None else None,
    }


def _rank_row(rank: RankView, now_s: float, window: int, *, has_ended: bool) -> dict[str, Any]:
    steps = rank.newest_steps(window)
    # Every share that is shown comes from these parts, so that no two contradict each other.
    parts = _mean_parts(steps, newest_of(rank.split_steps, window))
    step_s = sum(parts.values())
    return {
        "rank": rank.rank,
        "node": rank.facts.get("node"),
        "pid": rank.facts.get("pid"),
        "step": rank.number("torsh_step"),
        "step_s": step_s if steps else None,
        "busy_s": sum(parts[part] for part in _BUSY if part in parts) if steps else None,
        "wait_share": parts["wait"] / step_s if "wait" in parts and step_s > 0 else None,
        "data_share": parts["data"] / step_s if "data" in parts and step_s > 0 else None,
        "memory": rank.number("torsh_host_memory_bytes"),
        "device_memory": rank.number("torsh_device_memory_bytes"),
        "fragmentation": rank.number("torsh_device_memory_fragmentation_ratio"),
        "cores": rank.number("torsh_process_cpu_cores"),
        "flops": rank.number("torsh_flops_per_second"),
        "mfu": rank.number("torsh_mfu_ratio"),
        "is_silent": not has_ended and now_s - rank.heard_s > _SILENT_S,
        "silent_s": max(0.0, now_s - rank.heard_s),
        "parts": parts,
    }


def _curve(view: JobView) -> dict[str, list[Any]]:
    points = view.curve.points()
    return {
        "step": [point.step for point in points],
        "loss": [_short(point.loss) for point in points],
        # The first step has the start-up in it: beside its time, those of all others would be one flat line.
        "step_ms": [_short(point.step_s * 1e3) if at else None for at, point in enumerate(points)],
        "samples_per_s": [_short(point.samples_per_s) if at else None for at, point in enumerate(points)],
        "validation_step": [point.step for point in view.evaluations.points()],
        "validation_loss": [_short(point.loss) for point in view.evaluations.points()],
    }


def _operations(view: JobView) -> list[dict[str, Any]]:
    """By kind of operation, over all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for rank, (name, labels), value in view.values(_OPERATION_METRICS):
        row = found.setdefault(
            labels[0], {"op": labels[0], "count": 0, "bytes": 0, "errors": 0, "p50_s": [], "p95_s": [], "rate": []}
        )
        if name == "torsh_collectives":
            row["count"] += value
        elif name == "torsh_collective_bytes":
            row["bytes"] += value
        elif name == "torsh_collective_errors":
            row["errors"] += value
        elif name == "torsh_collective_bytes_per_second":
            row["rate"].append(value)
        elif isinstance(value, DistributionSummary):
            row["p50_s"].append(value.median)
            row["p95_s"].append(value.p95)
        row["ranks"] = max(row.get("ranks", 0), rank.rank + 1)
    for row in found.values():
        for name in ("p50_s", "p95_s", "rate"):
            row[name] = _short(_mean(row[name]))
    return sorted(found.values(), key=lambda row: -row["bytes"])


def _rates(view: JobView) -> list[dict[str, Any]]:
    """Axes, codecs and gates: latency, throughput and trend, means over the ranks that have one."""
    columns: dict[str, dict[str, list[float]]] = {}
    for _, (name, labels), value in view.values(_RATE_METRICS):
        kind, unit, what = _RATE_METRICS[name]
        row = columns.setdefault(" ".join([kind, *labels]), {})
        if isinstance(value, DistributionSummary):
            for column, figure in (("p50_s", value.median), ("p95_s", value.p95), ("p99_s", value.p99)):
                row.setdefault(column, []).append(figure)
        else:
            row.setdefault(f"{unit}_per_s" if what == "rate" else what, []).append(value)
    names = ("p50_s", "p95_s", "p99_s", "bytes_per_s", "tokens_per_s", "trend", "size")
    return [
        {"what": what, **{name: _short(_mean(row.get(name, ()))) for name in names}}
        for what, row in sorted(columns.items())
    ]


def _timeline(view: JobView) -> list[dict[str, Any]]:
    shown = [rank for _, rank in sorted(view.ranks.items()) if rank.timeline][:MAX_TIMELINE_RANKS]
    if not shown:
        return []
    # Ranks tell of their steps at different moments: shown is the newest that all of them have told of.
    common = set.intersection(*(set(rank.timelines) for rank in shown))
    drawn = {rank.rank: rank.timelines[max(common)] if common else rank.timeline for rank in shown}
    begin = min(start for spans in drawn.values() for _, start, _ in spans)
    return [
        {
            "rank": rank.rank,
            "spans": [[name, round(start - begin, 6), seconds] for name, start, seconds in drawn[rank.rank]],
        }
        for rank in shown
    ]


def _energy(view: JobView) -> dict[str, Any] | None:
    found = view.energy.summary(total_steps=view.total_steps)
    return None if found is None else {**found.to_dict(), "text": found.in_words()}


def _nodes(view: JobView) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for rank, (name, labels), value in view.values(_NODE_METRICS):
        if not isinstance(value, DistributionSummary):
            node = str(rank.facts.get("node", ""))
            row = found.setdefault(node, {"node": node, "values": {}})
            row["values"][" ".join([name.removeprefix("torsh_"), *labels])] = _short(value)
    return [found[node] for node in sorted(found)]


def _custom(view: JobView) -> list[dict[str, Any]]:
    found: dict[str, dict[int, float]] = {}
    definitions = view.definitions()
    if len(definitions) == len(CATALOGUE):
        return []
    for rank, (name, _), value in view.values({name for name in definitions if name.startswith(CUSTOM_PREFIX)}):
        number = value.mean if isinstance(value, DistributionSummary) else value
        found.setdefault(name, {})[rank.rank] = number
    return [
        {
            "name": name.removeprefix(CUSTOM_PREFIX),
            "unit": definitions[name].unit,
            "help": definitions[name].help,
            "mean": _short(_mean(values.values())),
            "low": _short(min(values.values())),
            "high": _short(max(values.values())),
        }
        for name, values in sorted(found.items())
    ]


def _mean_parts(steps: Sequence[StepRecord], looked_at: Sequence[StepRecord]) -> dict[str, float]:
    """Mean seconds by part of the steps, which add up to a step's; a part that no step measured is left out.

    Waits are measured in every step, forward, backward and optimizer in those that were looked at: the busy time of all
    is divided as in these.
    """
    waits = _means(steps, _WAITS)
    busy_s = sum(step.step_s for step in steps) / len(steps) - sum(waits.values()) if steps else 0.0
    divided = _means(looked_at, _BUSY)
    total_s = sum(divided.values())
    busy = {part: busy_s * seconds / total_s for part, seconds in divided.items()} if total_s > 0 else {"other": busy_s}
    found = {**waits, **busy} if steps else {}
    return {part: max(0.0, found[part]) for part in PARTS if part in found}


def _means(steps: Sequence[StepRecord], parts: Sequence[str]) -> dict[str, float]:
    """Over all of the steps; what one did not measure is in another part of it, and counts as none here."""
    columns = {part: [getattr(step, f"{part}_s") for step in steps] for part in parts}
    return {
        part: sum(seconds or 0.0 for seconds in column) / len(column)
        for part, column in columns.items()
        if any(seconds is not None for seconds in column)
    }


def _mean_of_parts(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over the ranks that told of steps; like theirs they add up to the mean of a step."""
    told = [parts for parts in ranks if parts]
    return {
        part: sum(parts.get(part, 0.0) for parts in told) / len(told)
        for part in PARTS
        if any(part in parts for parts in told)
    }


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
