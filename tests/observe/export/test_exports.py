"""What is exported, read back by the format's own reader where there is one."""

from __future__ import annotations

import base64
import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.bed.world import ROOT
from tests.observe.packets import FakeRank, job_of_two
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.observe.export.grafana_dashboard import grafana_dashboard
from torsh_distributed.observe.export.prometheus_text import job_registry, render
from torsh_distributed.observe.export.pushgateway import Pushgateway
from torsh_distributed.observe.export.registry import make_exporter
from torsh_distributed.observe.metrics.catalogue import CATALOGUE, MetricKind


@contextmanager
def receiver(*, status: int = 200) -> Iterator[tuple[str, list[tuple[str, str, bytes]]]]:
    """An HTTP server that keeps what it is sent: (method, path, body)."""
    taken: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def _take(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            taken.append((self.command, self.path, body))
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_PUT = do_DELETE = _take  # noqa: N815

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", taken
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def job_with_odd_labels() -> Any:
    view = job_of_two(5)
    rank = FakeRank(0, node='a"b\\c\nd')
    rank.step()
    rank.collector.metrics("torsh_node_load").record(1.0)
    rank.collector.metrics("torsh_collectives", 'x"y\n').record(1)
    rank.collector.metrics.custom("accuracy", help="over <b>").record(0.5)
    view.take(rank.packet())
    return view


OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.mark.parametrize("accept", ["*/*", OPEN_METRICS])
def test_prometheus_reads_every_family_back(accept: str) -> None:
    body, content_type = render(job_registry(job_with_odd_labels()), accept)
    parse = parse_open_metrics if "openmetrics" in content_type else parse_text
    families = {family.name: family for family in parse(body.decode())}
    for name in ("torsh_loss", "torsh_step_seconds", "torsh_steps", "torsh_custom_accuracy", "torsh_ranks"):
        assert name in families, sorted(families)
    histogram = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in families["torsh_step_seconds"].samples
        if sample.labels.get("rank") == "1"
    }
    assert histogram["torsh_step_seconds_count", None] == 5
    assert histogram["torsh_step_seconds_bucket", "+Inf"] == 5
    assert histogram["torsh_step_seconds_bucket", "0.05"] == 5
    assert histogram["torsh_step_seconds_bucket", "0.025"] == 0
    labels = {sample.labels["op"] for sample in families["torsh_collectives"].samples}
    assert labels == {"all_reduce", 'x"y\n'}
    assert {sample.labels["node"] for sample in families["torsh_node_load"].samples} == {'a"b\\c\nd'}


OTLP = pytest.mark.needs_library("opentelemetry.exporter.otlp.proto.http")


@OTLP
def test_otlp_reaches_a_receiver_with_every_point() -> None:
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    view = job_of_two(5)
    with receiver() as (address, taken):
        make_exporter(f"otlp:{address}").export(view)
    ((method, path, body),) = taken
    assert (method, path) == ("POST", "/v1/metrics")
    (resource,) = MessageToDict(ExportMetricsServiceRequest.FromString(body))["resourceMetrics"]
    assert {one["key"] for one in resource["resource"]["attributes"]} >= {"service.name", "torsh.run_id"}
    metrics = {metric["name"]: metric for metric in resource["scopeMetrics"][0]["metrics"]}
    points = metrics["torsh_step_seconds"]["histogram"]["dataPoints"]
    assert [point["count"] for point in points] == ["5", "5"]
    assert all(len(point["bucketCounts"]) == len(point["explicitBounds"]) + 1 for point in points)
    assert metrics["torsh_steps"]["sum"]["isMonotonic"] is True
    assert metrics["torsh_loss"]["gauge"]["dataPoints"][0]["asDouble"] == pytest.approx(1.6)
    assert metrics["torsh_step_seconds"]["unit"] == "s"


def test_the_pushgateway_gets_the_job_and_a_success_removes_it() -> None:
    view = job_of_two(5)
    with receiver() as (address, taken):
        gateway = Pushgateway(address)
        gateway.export(view)
        view.header.exit_code = 1
        gateway.close(view)
        view.header.exit_code = 0
        gateway.close(view)
    assert [(method, path) for method, path, _ in taken] == [
        ("PUT", "/metrics/job/torsh/run/test"),
        ("PUT", "/metrics/job/torsh/run/test"),
        ("DELETE", "/metrics/job/torsh/run/test"),
    ]
    assert b'torsh_loss{rank="0"}' in taken[0][2]


def test_files_have_a_row_for_every_value(tmp_path: Path) -> None:
    view = job_of_two(5)
    for kind in ("jsonl", "csv"):
        exporter = make_exporter(f"{kind}:{tmp_path / 'out' / f'metrics.{kind}'}")
        exporter.export(view)
        exporter.close(view)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["metric"] == "torsh_step_seconds" and line["labels"] == {"rank": "1"}]
    assert [line["count"] for line in steps] == [5, 5]
    assert steps[0]["median"] == pytest.approx(0.03)
    rows = list(csv.DictReader((tmp_path / "out" / "metrics.csv").read_text().splitlines()))
    losses = [float(row["value"]) for row in rows if row["metric"] == "torsh_loss" and row["labels"] == "rank=0"]
    assert losses == pytest.approx([1.6, 1.6])


@pytest.mark.needs_library("tensorboard")
def test_tensorboard_reads_every_step_from_a_private_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    view = job_of_two(5)
    exporter = make_exporter(f"tensorboard:{tmp_path / 'logs'}")
    exporter.export(view)
    exporter.close(view)
    (path,) = (tmp_path / "logs").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    losses = {event.step: event.value for event in found.Scalars("training/loss")}
    assert losses == pytest.approx({step: 2.1 - 0.1 * step for step in range(1, 6)}, rel=1e-6)
    newest = [tag for tag in found.Tags()["scalars"] if tag.startswith("rank0/")]
    assert newest
    assert {event.step for tag in newest for event in found.Scalars(tag)} == {5}
    assert [event.wall_time for event in found.Scalars("training/step_seconds")] == [
        point.time for point in view.curve.points()
    ]


@pytest.mark.parametrize(
    ("text", "package", "extra"),
    [
        ("tensorboard:logs", "tensorboard.summary.writer.record_writer", "tensorboard"),
        ("otlp:http://localhost", "torsh_distributed.observe.export.otlp_metrics", "otlp"),
        ("otlp-traces:http://localhost", "torsh_distributed.observe.export.otlp_traces", "otlp"),
        ("wandb:project", "wandb", "wandb"),
        ("mlflow:", "mlflow", "mlflow"),
    ],
)
def test_an_export_without_its_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, text: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FeatureNotAvailable, match=rf"torsh-distributed\[{extra}\]"):
        make_exporter(text)


@pytest.mark.parametrize(
    "text", ["", "csv", "csv:", "xml:a", pytest.param("otlp:file:///etc/passwd", marks=OTLP), "pushgateway:localhost"]
)
def test_an_export_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        make_exporter(text)


def in_a_process_of_its_own(function: Callable[[Path], None], folder: Path) -> None:
    """Both trackers leave threads, processes and variables behind in the process that uses them."""
    code = f"from pathlib import Path; from {__name__} import {function.__name__} as run; run(Path({str(folder)!r}))"
    env = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def export_to_wandb(folder: Path) -> None:
    exporter = make_exporter("wandb:test")
    view = job_of_two(5)
    exporter.export(view)
    exporter.close(view)


@pytest.mark.ranks
@pytest.mark.needs_library("wandb")
def test_wandb_takes_the_curve(tmp_path: Path) -> None:
    in_a_process_of_its_own(export_to_wandb, tmp_path)
    (written,) = tmp_path.rglob("*.wandb")
    assert written.stat().st_size > 0


def export_to_mlflow(folder: Path) -> None:
    import mlflow

    exporter = make_exporter(f"mlflow:file://{folder}/runs")
    view = job_of_two(5)
    view.header.exit_code = 0
    exporter.export(view)
    run = mlflow.active_run()
    exporter.close(view)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in history] == [1, 2, 3, 4, 5]


@pytest.mark.ranks
@pytest.mark.needs_library("mlflow")
def test_mlflow_takes_the_curve(tmp_path: Path) -> None:
    in_a_process_of_its_own(export_to_mlflow, tmp_path)


def test_every_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    dashboard = grafana_dashboard()
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) >= len(CATALOGUE) - 1
    known = set()
    for name, definition in CATALOGUE.items():
        suffix = {MetricKind.COUNTER: "_total", MetricKind.DISTRIBUTION: "_bucket"}.get(definition.kind, "")
        known.add(name + suffix)
    import re

    named = {name for query in asked for name in re.findall(r"torsh_\w+", query)}
    assert named <= known
    assert known - named == {"torsh_last_step_timestamp_seconds"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    json.dumps(dashboard)


@OTLP
@pytest.mark.parametrize("kind", ["otlp", "otlp-traces"])
def test_a_collector_that_refuses_is_told_with_its_reason(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with receiver(status=404) as (address, taken):
        exporter = make_exporter(f"{kind}:{address}")
        with pytest.raises(OSError, match=r"did not take it: .*404"):
            exporter.export(job_of_two(5))
    assert len(taken) == 1
    assert not caplog.records, "the caller reports it, once"


def spans_of(bodies: list[tuple[str, str, bytes]]) -> list[dict[str, Any]]:
    """As a collector reads them; ids as hexadecimal text."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = [
        span
        for _, _, body in bodies
        for resource in MessageToDict(ExportTraceServiceRequest.FromString(body))["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    for span in spans:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64decode(span[name]).hex()
    return spans


@OTLP
def test_otlp_spans_reach_a_receiver_as_one_trace() -> None:
    view = job_of_two(5)
    view.take({"type": "membership", "action": "lost", "detail": "worker 1"})
    rank = FakeRank(0)
    with receiver() as (address, taken):
        exporter = make_exporter(f"otlp-traces:{address}")
        exporter.export(view)
        for _ in range(2):
            rank.step()
        packet = rank.packet()
        packet["marks"] = [{"type": "checkpoint", "time": 1_700_000_100.0, "action": "saved", "duration_s": 2.0}]
        view.take(packet)
        exporter.export(view)
        view.take({"type": "membership", "action": "ended", "exit_code": 1})
        exporter.close(view)
    assert {(method, path) for method, path, _ in taken} == {("POST", "/v1/traces")}
    spans = spans_of(taken)
    assert len({span["traceId"] for span in spans}) == 1
    by_id = {span["spanId"]: span for span in spans}
    steps = [span for span in spans if span["name"].startswith("step ")]
    assert len(steps) == 12, "five of two ranks, then two of one"
    (job,) = [span for span in spans if "parentSpanId" not in span]
    assert (job["name"], job["status"]) == ("job test", {"code": "STATUS_CODE_ERROR"})
    assert {span["parentSpanId"] for span in steps} == {job["spanId"]}
    forward = next(span for span in spans if span["name"] == "forward")
    assert by_id[forward["parentSpanId"]]["name"] == "step 4", "the roundest of five"
    saved = next(span for span in spans if span["name"] == "checkpoint saved")
    assert int(saved["endTimeUnixNano"]) - int(saved["startTimeUnixNano"]) == 2_000_000_000
    assert {"membership lost", "membership ended"} <= {span["name"] for span in spans}
    first = next(span for span in steps if span["name"] == "step 3")
    told = {one["key"]: next(iter(one["value"].values())) for one in first["attributes"]}
    assert told["torsh.wait_s"] == pytest.approx(0.01)


def test_buckets_have_the_step_that_fell_into_them_as_exemplar() -> None:
    view = job_of_two(5)
    slow = FakeRank(1)
    slow.step()
    slow.step(compute_s=2.0)
    slow.step()
    view.take(slow.packet())
    body, _ = render(job_registry(view), OPEN_METRICS)

    def found(text: str) -> dict[str, Any]:
        families = {family.name: family for family in parse_open_metrics(text)}
        return {
            sample.labels["le"]: sample.exemplar
            for sample in families["torsh_step_seconds"].samples
            if sample.exemplar is not None and sample.labels["rank"] == "1"
        }

    exemplars = found(body.decode())
    assert {bound: one.labels["step"] for bound, one in exemplars.items()} == {"0.05": "3", "2.5": "2"}
    assert exemplars["2.5"].value == pytest.approx(2.01)
    assert b"span_id" not in body, "nothing is traced"


@OTLP
def test_exemplars_name_the_span_of_a_traced_step() -> None:
    view = job_of_two(5)
    with receiver() as (address, taken):
        make_exporter(f"otlp-traces:{address}").export(view)
    families = parse_open_metrics(render(job_registry(view), OPEN_METRICS)[0].decode())
    (step_seconds,) = [family for family in families if family.name == "torsh_step_seconds"]
    told = [sample.exemplar.labels for sample in step_seconds.samples if sample.exemplar is not None]
    spans = {(span["traceId"], span["spanId"]): span["name"] for span in spans_of(taken)}
    assert told
    assert all(spans[one["trace_id"], one["span_id"]] == f"step {one['step']}" for one in told)
    assert b"trace_id" not in render(job_registry(view), "*/*")[0], "the older format has none"
