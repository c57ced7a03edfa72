"""A running job under the real Prometheus and the real Pushgateway, as a site would have them."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.bed.ports import free_port
from tests.launch.observing.test_job_observer import PLAIN_LOOP, get, start
from tests.observe.export.test_exports import receiver
from torsh_distributed.observe.alerts.alert_rules import AlertRule, AlertSeverity, prometheus_rules

pytestmark = pytest.mark.ranks

CONFIG = """
global:
  scrape_interval: 1s
scrape_configs:
  - job_name: torsh
    static_configs:
      - targets: ["127.0.0.1:{job}"]
  - job_name: gateway
    honor_labels: true
    static_configs:
      - targets: ["127.0.0.1:{gateway}"]
"""


ALERTING = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: [rules.yml]
alerting:
  alertmanagers:
    - static_configs:
        - targets: ["127.0.0.1:{manager}"]
scrape_configs:
  - job_name: torsh
    static_configs:
      - targets: ["127.0.0.1:{job}"]
"""
ROUTE = """
route:
  receiver: hook
  group_by: [alertname]
  group_wait: 1s
receivers:
  - name: hook
    webhook_configs:
      - url: "{address}/hook"
"""


@contextmanager
def server(*command: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def until(what: Callable[[], Any], within_s: float = 60) -> Any:
    """The first answer that is not empty; servers that do not listen yet have none."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            found = what()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < deadline, "no answer in time"
        time.sleep(0.1)


@pytest.mark.matrix
@pytest.mark.needs_command("prometheus")
@pytest.mark.needs_command("prometheus-pushgateway")
def test_prometheus_scrapes_a_running_job_and_what_it_pushes(tmp_path: Path) -> None:
    job, gateway, prometheus = free_port(), free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(CONFIG.format(job=job, gateway=gateway))

    def query(text: str) -> list[dict[str, Any]]:
        answer = json.loads(get(f"http://127.0.0.1:{prometheus}/api/v1/query?query={urllib.parse.quote(text)}"))
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    push = server("prometheus-pushgateway", f"--web.listen-address=127.0.0.1:{gateway}")
    scrape = server(
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{prometheus}",
    )
    with push, scrape:
        until(lambda: get(f"http://127.0.0.1:{gateway}/-/ready"))
        options = ["--prometheus-port", str(job), "--export", f"pushgateway:http://127.0.0.1:{gateway}"]
        process = start(tmp_path, PLAIN_LOOP, *options)
        try:
            scraped = f'torsh_steps_total{{instance="127.0.0.1:{job}"}} > 0'
            until(lambda: {one["metric"]["rank"] for one in query(scraped)} == {"0", "1"})
            (up,) = query('up{job="torsh"}')
            assert up["value"][1] == "1"
            until(lambda: len(query("sum by (rank) (rate(torsh_step_seconds_count[10s])) > 0")) == 2)
            until(lambda: query('torsh_steps_total{job="torsh",run!=""}'))
        finally:
            (tmp_path / "stop").touch()
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert "torsh_steps" not in get(f"http://127.0.0.1:{gateway}/metrics"), "a job that succeeded is removed"


@pytest.mark.matrix
@pytest.mark.needs_command("prometheus")
@pytest.mark.needs_command("prometheus-alertmanager")
def test_our_rules_fire_in_prometheus_and_alertmanager_tells_a_receiver(tmp_path: Path) -> None:
    job, prometheus, manager = free_port(), free_port(), free_port()
    rules = [AlertRule(name="TorshTrains", metric="torsh_steps", operator=">", value=0, severity=AlertSeverity.ERROR)]
    (tmp_path / "rules.yml").write_text(prometheus_rules(rules))
    with receiver() as (address, taken):
        (tmp_path / "prometheus.yml").write_text(ALERTING.format(job=job, manager=manager))
        (tmp_path / "alertmanager.yml").write_text(ROUTE.format(address=address))
        alerting = server(
            "prometheus-alertmanager",
            f"--config.file={tmp_path / 'alertmanager.yml'}",
            f"--storage.path={tmp_path / 'alerts'}",
            f"--web.listen-address=127.0.0.1:{manager}",
            "--cluster.listen-address=",
        )
        scrape = server(
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
        )
        with alerting, scrape:
            process = start(tmp_path, PLAIN_LOOP, "--prometheus-port", str(job))
            try:
                (_, path, body), *_ = until(lambda: list(taken))
            finally:
                (tmp_path / "stop").touch()
                output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
    assert path == "/hook"
    told = json.loads(body)
    assert told["status"] == "firing"
    assert told["groupLabels"] == {"alertname": "TorshTrains"}
    assert {alert["labels"]["severity"] for alert in told["alerts"]} == {"error"}
    assert {alert["labels"]["rank"] for alert in told["alerts"]} <= {"0", "1"}
