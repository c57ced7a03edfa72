"""Rules, what they fire, and what is done then."""

from __future__ import annotations

import json
import shutil
import socketserver
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.observe.export.test_exports import receiver
from tests.observe.packets import FakeRank, job_of_two
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.observe.alerts.alert_actions import (
    AlertAction,
    CommandAlert,
    EmailAlert,
    WebhookAlert,
    make_action,
)
from torsh_distributed.observe.alerts.alert_manager import Alert, AlertManager
from torsh_distributed.observe.alerts.alert_queue import MAX_WAITING, AlertQueue
from torsh_distributed.observe.alerts.alert_rules import (
    AlertRule,
    AlertSeverity,
    ConditionKind,
    prometheus_rules,
    read_rules,
)
from torsh_distributed.observe.job.job_view import JobView

RULES = """
[[rule]]
name = "memory"
metric = "torsh_host_memory_bytes"
operator = ">"
value = 8e9
for_s = 30
severity = "critical"
actions = ["log", "ops"]

[[rule]]
name = "all-reduce gets slower"
condition = "rate"
metric = "torsh_wait_ratio"
value = 0.005
window_s = 60

[[rule]]
name = "no steps"
condition = "absence"
metric = "torsh_step"
window_s = 600

[action.ops]
kind = "webhook"
url = "http://localhost:9/hook"
shape = "slack"
"""


def job(**values: float) -> JobView:
    """Two ranks with the same gauges, and `r1_` ones for rank 1 alone."""
    view = JobView()
    for number in range(2):
        rank = FakeRank(number)
        for name, value in values.items():
            if not name.startswith("r1_") or number == 1:
                rank.collector.metrics(f"torsh_{name.removeprefix('r1_')}").record(value)
        view.take(rank.packet())
    return view


def test_a_threshold_names_every_rank_that_meets_it() -> None:
    manager = AlertManager([AlertRule(name="hot", metric="torsh_loss", value=5)])
    assert manager.check(job(loss=4), now=0) == []
    (alert,) = manager.check(job(loss=6), now=1)
    assert alert.series == ("rank 0", "rank 1")
    assert "torsh_loss is 6, > 5" in alert.message
    (again,) = AlertManager([AlertRule(name="hot", metric="torsh_loss", value=5)]).check(job(r1_loss=6), now=0)
    assert again.series == ("rank 1",)


def test_a_rule_with_labels_looks_at_those_series_alone() -> None:
    view = job(loss=6)
    rule = AlertRule(name="hot", metric="torsh_loss", value=5, labels={"rank": "1"})
    (alert,) = AlertManager([rule]).check(view, now=0)
    assert alert.series == ("rank 1",)
    assert 'expr: torsh_loss{rank="1"} > 5' in prometheus_rules([rule])


@pytest.mark.parametrize(("sign", "met"), [(">", 6), (">=", 5), ("<", 4), ("<=", 5), ("==", 5), ("!=", 4)])
def test_every_operator(sign: str, met: float) -> None:
    manager = AlertManager([AlertRule(name="r", metric="torsh_loss", operator=sign, value=5)])
    assert len(manager.check(job(loss=met), now=0)) == 1


def test_it_must_hold_for_a_while_and_what_is_missing_is_not_zero() -> None:
    manager = AlertManager([AlertRule(name="low", metric="torsh_loss", operator="<", value=1, for_s=10)])
    assert manager.check(job(), now=0) == [], "no value is not a low value"
    assert manager.check(job(loss=0.5), now=1) == []
    assert manager.check(job(loss=2), now=6) == []
    assert manager.check(job(loss=0.5), now=8) == [], "it begins again"
    assert manager.check(job(loss=0.5), now=17) == []
    assert len(manager.check(job(loss=0.5), now=18)) == 1


def test_cooldown_acknowledging_and_resolving() -> None:
    manager = AlertManager([AlertRule(name="hot", metric="torsh_loss", value=5, cooldown_s=100)])
    (first,) = manager.check(job(loss=6), now=0)
    assert manager.check(job(loss=6), now=50) == []
    (second,) = manager.check(job(loss=6), now=100)
    assert manager.acknowledge(second.id)
    assert not manager.acknowledge("nothing")
    assert manager.check(job(loss=6), now=300) == [], "acknowledged: not told again"
    assert manager.unacknowledged == []
    assert manager.values() == {("torsh_alert_firing", ("hot", "warning")): 1.0}
    manager.check(job(loss=1), now=301)
    assert manager.firing == []
    assert [(alert.id, alert.resolved) for alert in manager.history] == [(first.id, None), (second.id, 301)]
    (third,) = manager.check(job(loss=6), now=402)
    assert third.id not in (first.id, second.id)
    assert manager.statistics() == {"severity": {"warning": 3}, "rule": {"hot": 3}}
    assert manager.remove_rule("hot")
    assert manager.check(job(loss=6), now=900) == []


def test_a_rate_is_per_second_whatever_the_window() -> None:
    for window_s in (20.0, 60.0):
        manager = AlertManager(
            [AlertRule(name="r", condition=ConditionKind.RATE, metric="torsh_loss", value=0.5, window_s=window_s)]
        )
        for now in range(0, 40, 2):
            assert manager.check(job(loss=1 + 0.4 * now), now=now) == []
        found = [manager.check(job(loss=20 + 2 * (now - 40)), now=now) for now in range(40, 100, 2)]
        assert any(found)


def test_an_anomaly_of_its_own_metric() -> None:
    rule = AlertRule(name="odd", condition=ConditionKind.ANOMALY, metric="torsh_loss", value=6)
    manager = AlertManager([rule])
    for now in range(20):
        assert manager.check(job(loss=2 + 0.01 * (now % 3), learning_rate=100 * (now % 2)), now=now) == []
    assert len(manager.check(job(loss=3), now=20)) == 1


def test_absence_and_a_function_of_the_job() -> None:
    absence = AlertRule(name="gone", condition=ConditionKind.ABSENCE, metric="torsh_loss", window_s=60)
    custom = AlertRule(
        name="few", condition=ConditionKind.CUSTOM, check=lambda view: "too few" if len(view.ranks) < 5 else None
    )
    manager = AlertManager([absence, custom])
    manager._started = 0.0
    (few,) = manager.check(job(loss=1), now=1)
    assert few.message == "too few"
    assert manager.check(job(), now=60) == []
    (gone,) = manager.check(job(), now=62)
    assert gone.name == "gone"


def test_rules_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    rules, actions = read_rules(path)
    assert [rule.name for rule in rules] == ["memory", "all-reduce gets slower", "no steps"]
    assert rules[0].severity is AlertSeverity.CRITICAL
    assert actions["ops"]["shape"] == "slack"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_los'\n", "there is no metric"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\nabove = 5\n", "a rule has no key above"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\nvalue = 'high'\n", "value must be a number"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\nseverity = 'bad'\n", "is not a valid AlertSeverity"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\noperator = '~'\n", "an operator is one of"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\nactions = ['page']\n", "names an action that the file does not"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\nlabels = { op = 'x' }\n", "torsh_loss has no label op"),
        ("[[rule]]\nname = 'x'\nmetric = 'torsh_loss'\nlabels = { rank = 1 }\n", "labels is a table of texts"),
        ("[[rule]]\nmetric = 'torsh_loss'\n", "a rule needs a name"),
        ("[[rule]]\nname = 'x'\ncondition = 'custom'\n", "needs a function"),
        ("[[rule]]\nname='x'\nmetric='torsh_loss'\n[[rule]]\nname='x'\nmetric='torsh_loss'\n", "the same name"),
        ("[alert]\n", "has tables"),
        ("not toml", "cannot be read"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=problem):
        read_rules(path)


ALERT = Alert("hot-1", "hot", AlertSeverity.ERROR, "rank 1; torsh_loss is 6", 12.0, ("rank 1",))


def test_webhooks_arrive_in_the_shape_that_was_asked_for() -> None:
    with receiver() as (address, taken):
        for shape in ("json", "slack", "pagerduty"):
            WebhookAlert(address, shape=shape, routing_key="key").run(ALERT, "run-7")
    plain, slack, pagerduty = (json.loads(body) for _, _, body in taken)
    assert (plain["name"], plain["series"], plain["run_id"]) == ("hot", ["rank 1"], "run-7")
    assert slack == {"text": "torsh run-7: error: hot: rank 1; torsh_loss is 6"}
    assert pagerduty["event_action"] == "trigger"
    assert pagerduty["payload"]["severity"] == "error"


def test_an_alert_that_clears_resolves_its_incident_at_pagerduty() -> None:
    rule = AlertRule(name="hot", metric="torsh_loss", value=5, actions=("ops", "chat", "plain"))
    with receiver() as (address, taken):
        actions: dict[str, AlertAction] = {
            "ops": WebhookAlert(address + "/ops", shape="pagerduty", routing_key="key"),
            "chat": WebhookAlert(address + "/chat", shape="slack"),
            "plain": WebhookAlert(address + "/plain"),
        }
        alerts = AlertQueue(actions, run_id=lambda: "run-7", tell=lambda text: None)
        manager = AlertManager([rule], on_alert=alerts.put, on_clear=alerts.put)
        manager.check(job(loss=6), now=0)
        manager.check(job(loss=6, r1_loss=4), now=1)  # still holds for rank 0
        manager.check(job(loss=4), now=2)
        manager.check(job(loss=4), now=3)
        alerts.close(timeout_s=60)
    sent = [(path, json.loads(body)) for _, path, body in taken]
    assert [path for path, _ in sent] == ["/ops", "/chat", "/plain", "/ops"]
    opened, resolved = sent[0][1], sent[3][1]
    assert resolved == {"routing_key": "key", "event_action": "resolve", "dedup_key": opened["dedup_key"]}
    assert manager.history[0].resolved == 2


def test_a_mail_arrives_at_an_smtp_server() -> None:
    lines: list[str] = []

    class Smtp(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 test\r\n")
            while line := self.rfile.readline().decode().rstrip():
                lines.append(line)
                if line.upper() == "DATA":
                    self.wfile.write(b"354 go\r\n")
                    while (text := self.rfile.readline().decode().rstrip("\r\n")) != ".":
                        lines.append(text)
                    self.wfile.write(b"250 kept\r\n")
                else:
                    self.wfile.write(b"221 bye\r\n" if line.upper() == "QUIT" else b"250 ok\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Smtp) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        port = server.server_address[1]
        EmailAlert(to="ops@example.org", sender="torsh@example.org", host="127.0.0.1", port=port).run(ALERT, "run")
        thread.join(20)
    assert "Subject: torsh run: error: hot" in lines
    assert "rank 1; torsh_loss is 6" in lines


def test_a_command_gets_the_alert_and_its_failure_is_told(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1], 'w').write(sys.stdin.read())"
    CommandAlert([sys.executable, "-c", code, str(tmp_path / "out")]).run(ALERT, "run")
    assert json.loads((tmp_path / "out").read_text())["id"] == "hot-1"
    with pytest.raises(OSError, match="ended with exit code 3"):
        CommandAlert([sys.executable, "-c", "raise SystemExit(3)"]).run(ALERT, "run")


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "fax"},
        {"kind": "webhook", "url": "http://x", "shape": "teams"},
        {"kind": "webhook", "url": "http://x", "shape": "pagerduty"},
        {"kind": "webhook"},
        {"kind": "webhook", "url": "http://x", "color": "red"},
        {"kind": "command", "command": []},
        {"kind": "plan", "learning_rate_factor": 0.5},
        {"kind": "plan", "set": {"mesh": {"tp": 2}}},
    ],
)
def test_an_action_that_is_not_understood_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make_action("ops", table)


def test_a_change_of_the_plan_is_asked_of_the_launcher_in_one_short_text() -> None:
    asked: list[str] = []
    table = {"kind": "plan", "set": {"training": {"gradient_clipping": 0.5}}}
    action = make_action("calm", table, ask_launcher=asked.append)
    action.run(replace(ALERT, message="rank 1\nand " + "x" * 9000), "run")
    change, _, reason = asked[0].partition("\n")
    assert json.loads(change)["set"] == {"training": {"gradient_clipping": 0.5}}
    assert reason.startswith("alert hot: rank 1 and xxx")
    assert len(asked[0].encode()) < 2000
    with pytest.raises(ConfigurationError, match=r"action calm: mesh\.tp cannot change while a job runs"):
        make_action("calm", {"kind": "plan", "set": {"mesh": {"tp": 2}}}, ask_launcher=asked.append)


class Flaky(AlertAction):
    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.taken: list[str] = []
        self.done = threading.Event()

    def run(self, alert: Alert, run_id: str) -> None:
        self.taken.append(alert.id)
        if len(self.taken) <= self.failures:
            raise OSError("down")
        self.done.set()


def test_what_fails_is_tried_again_then_told_and_the_queue_is_bounded() -> None:
    told: list[str] = []
    works, broken = Flaky(2), Flaky(10**9)
    queue = AlertQueue({"works": works, "broken": broken}, run_id=lambda: "run", tell=told.append, retry_s=0.01)
    queue.put(AlertRule(name="r", metric="torsh_loss", actions=("works", "broken")), ALERT)
    assert works.done.wait(20)
    queue.close()
    assert len(works.taken) == 3
    assert told == ["the action broken of an alert does not work: down"]
    stuck = AlertQueue({"broken": broken}, run_id=lambda: "run", tell=told.append, retry_s=60)
    for _ in range(3 * MAX_WAITING):
        stuck.put(AlertRule(name="r", metric="torsh_loss", actions=("broken",)), ALERT)
    assert stuck.num_dropped >= MAX_WAITING
    stuck.close()


def exportable() -> list[AlertRule]:
    return [
        AlertRule(name="hot", metric="torsh_loss", value=5, for_s=30, severity=AlertSeverity.CRITICAL),
        AlertRule(name="rising", condition=ConditionKind.RATE, metric="torsh_wait_ratio", value=0.005),
        AlertRule(name="errors", metric="torsh_collective_errors", operator=">=", value=1),
        AlertRule(name="silent", condition=ConditionKind.ABSENCE, metric="torsh_step", window_s=600),
    ]


def test_rules_are_written_for_prometheus() -> None:
    (group,) = yaml.safe_load(prometheus_rules(exportable()))["groups"]
    assert [rule["expr"] for rule in group["rules"]] == [
        "torsh_loss > 5",
        "deriv(torsh_wait_ratio[60s]) > 0.005",
        "torsh_collective_errors_total >= 1",
        "absent_over_time(torsh_step[600s])",
    ]
    assert group["rules"][0]["for"] == "30s"
    with pytest.raises(FeatureNotAvailable, match="its condition is anomaly"):
        prometheus_rules([AlertRule(name="odd", condition=ConditionKind.ANOMALY, metric="torsh_loss")])


@pytest.mark.needs_command("promtool")
def test_promtool_accepts_them_and_they_fire_when_ours_do(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text(prometheus_rules(exportable()))
    promtool = shutil.which("promtool")
    assert promtool is not None
    subprocess.run([promtool, "check", "rules", str(rules)], check=True, capture_output=True)
    losses = [4, 6, 6, 6, 6, 4, 6, 6, 6, 6]
    manager = AlertManager([exportable()[0]])
    firing = []
    for number, loss in enumerate(losses):
        manager.check(job(loss=loss), now=15 * number)
        firing.append(bool(manager.firing))
    tests = [
        {
            "interval": "15s",
            "input_series": [{"series": 'torsh_loss{rank="0"}', "values": " ".join(map(str, losses))}],
            "alert_rule_test": [
                {
                    "eval_time": f"{15 * number}s",
                    "alertname": "hot",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "critical", "rank": "0"},
                            "exp_annotations": {"summary": "torsh_loss > 5"},
                        }
                    ]
                    if is_firing
                    else [],
                }
                for number, is_firing in enumerate(firing)
            ],
        }
    ]
    unit = tmp_path / "test.yml"
    unit.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_fell_silent_has_no_values_any_more() -> None:
    view = job_of_two(3)
    manager = AlertManager([AlertRule(name="low", metric="torsh_loss", operator="<", value=100)])
    assert len(manager.check(view, now=0)) == 1
    for rank in view.ranks.values():
        rank.heard_s -= 3600
    manager.check(view, now=1)
    assert manager.firing == []
