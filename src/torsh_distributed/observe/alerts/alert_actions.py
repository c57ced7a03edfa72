"""What is done when a rule fires: a log line, a webhook, an e-mail, a command, a change of the plan."""

from __future__ import annotations

import json
import smtplib
import subprocess
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, IoError
from torsh_distributed.observe.alerts.alert_manager import Alert
from torsh_distributed.observe.export.base import http_url

if TYPE_CHECKING:
    from torsh_distributed.plan.running_change import RunningChange

_TIMEOUT_S = 10.0
_MAX_REASON_CHARS = 500
_SHAPES = ("json", "slack", "pagerduty")
_PAGERDUTY_SEVERITY = {"info": "info", "warning": "warning", "error": "error"}


class AlertAction(ABC):
    """Does something about an alert. May block for some seconds; raises OSError if it did not work."""

    @abstractmethod
    def run(self, alert: Alert, run_id: str) -> None:
        """Act on the alert of the job `run_id`."""

    def clear(self, alert: Alert, run_id: str) -> None:  # noqa: B027 - most actions have nothing to take back
        """What the alert was about no longer holds: undo what `run` opened, if it opened anything."""


class LogAlert(AlertAction):
    """A line where the job's own lines go."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    @override
    def run(self, alert: Alert, run_id: str) -> None:
        self._tell(f"alert ({alert.severity.value}) {alert.name}: {alert.message}")


class WebhookAlert(AlertAction):
    """A POST to an address, as plain JSON or in the shape that Slack or PagerDuty takes."""

    def __init__(self, url: str, *, shape: str = "json", routing_key: str = "") -> None:
        self._url = http_url(url)
        if shape not in _SHAPES:
            raise ConfigurationError(f"a webhook's shape is one of {', '.join(_SHAPES)}", got=shape)
        if shape == "pagerduty" and not routing_key:
            raise ConfigurationError("PagerDuty needs a routing_key", hint="it is in the service's integration")
        self._shape = shape
        self._routing_key = routing_key

    @override
    def run(self, alert: Alert, run_id: str) -> None:
        self._post(self.body(alert, run_id))

    @override
    def clear(self, alert: Alert, run_id: str) -> None:
        """PagerDuty keeps an incident open until it is resolved; the other shapes are messages, and stay."""
        if self._shape == "pagerduty":
            self._post({**self._incident(alert, run_id), "event_action": "resolve"})

    def _incident(self, alert: Alert, run_id: str) -> dict[str, Any]:
        return {"routing_key": self._routing_key, "dedup_key": f"torsh-{run_id}-{alert.name}"}

    def _post(self, body: Mapping[str, Any]) -> None:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._url,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            answer.read(1 << 16)

    def body(self, alert: Alert, run_id: str) -> dict[str, Any]:
        """What is posted when it fires."""
        text = f"{alert.severity.value}: {alert.name}: {alert.message}"
        if self._shape == "slack":
            return {"text": f"torsh {run_id}: {text}"}
        if self._shape == "pagerduty":
            return {
                **self._incident(alert, run_id),
                "event_action": "trigger",
                "payload": {
                    "summary": text[:1024],
                    "source": f"torsh {run_id}",
                    "severity": _PAGERDUTY_SEVERITY.get(alert.severity.value, "critical"),
                    "custom_details": {"series": list(alert.series)},
                },
            }
        return {
            "run_id": run_id,
            "id": alert.id,
            "name": alert.name,
            "severity": alert.severity.value,
            "message": alert.message,
            "time": alert.time,
            "series": list(alert.series),
        }


class EmailAlert(AlertAction):
    """An e-mail through an SMTP server, without or with a password from the environment's TORSH_SMTP_PASSWORD."""

    def __init__(
        self, *, to: str, sender: str, host: str = "localhost", port: int = 25, user: str = "", password: str = ""
    ) -> None:
        self._to, self._sender, self._host, self._port = to, sender, host, port
        self._user, self._password = user, password

    @override
    def run(self, alert: Alert, run_id: str) -> None:
        message = EmailMessage()
        subject = f"torsh {run_id}: {alert.severity.value}: {alert.name}"
        message["Subject"] = " ".join(subject.split())[:200]
        message["From"], message["To"] = self._sender, self._to
        message.set_content(alert.message)
        with smtplib.SMTP(self._host, self._port, timeout=_TIMEOUT_S) as server:
            if self._user:
                server.starttls()
                server.login(self._user, self._password)
            server.send_message(message)


class CommandAlert(AlertAction):
    """A command, without a shell; the alert is JSON on its standard input."""

    def __init__(self, command: list[str]) -> None:
        if not command or not all(isinstance(word, str) for word in command):
            raise ConfigurationError("a command is a list of words", got=repr(command)[:100])
        self._command = command

    @override
    def run(self, alert: Alert, run_id: str) -> None:
        told = WebhookAlert("http://localhost").body(alert, run_id)
        try:
            done = subprocess.run(
                self._command, input=json.dumps(told).encode(), timeout=_TIMEOUT_S, capture_output=True, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise IoError(f"{self._command[0]} did not end within {_TIMEOUT_S:g} s") from error
        if done.returncode:
            raise IoError(f"{self._command[0]} ended with exit code {done.returncode}")


class PlanChangeAlert(AlertAction):
    """A change of the plan, which the running Engines take between two updates; the launcher is asked for it."""

    def __init__(self, change: RunningChange, ask_launcher: Callable[[str], None]) -> None:
        self._change = json.dumps(change.to_dict())
        self._ask_launcher = ask_launcher

    @override
    def run(self, alert: Alert, run_id: str) -> None:
        reason = " ".join(f"alert {alert.name}: {alert.message}".split())[:_MAX_REASON_CHARS]
        self._ask_launcher(f"{self._change}\n{reason}")


def make_action(
    name: str,
    table: Mapping[str, Any],
    *,
    smtp_password: str = "",
    ask_launcher: Callable[[str], None] | None = None,
) -> AlertAction:
    """The action of a table `[action.NAME]`; raises ConfigurationError for what is not understood.

    `ask_launcher` takes what a change of the plan asks for; without it, such an action is refused.
    """
    kind = table.get("kind")
    given = {key: value for key, value in table.items() if key != "kind"}
    if kind == "plan":
        change = _plan_change(name, given)
        if ask_launcher is None:
            raise ConfigurationError(
                f"the action {name} changes the plan, which needs the launcher of the job",
                hint="start the job with `torsh run`",
                action=name,
            )
        return PlanChangeAlert(change, ask_launcher)
    kinds: dict[str, tuple[type[AlertAction], set[str]]] = {
        "webhook": (WebhookAlert, {"url", "shape", "routing_key"}),
        "email": (EmailAlert, {"to", "sender", "host", "port", "user"}),
        "command": (CommandAlert, {"command"}),
    }
    if kind not in kinds:
        known = ", ".join([*kinds, "plan"])
        raise ConfigurationError(f"the kind of an action is one of {known}", action=name, got=str(kind))
    made, keys = kinds[kind]
    unknown = set(given) - keys
    if unknown:
        raise ConfigurationError(
            f"an action of kind {kind} has no key {', '.join(sorted(unknown))}",
            hint=f"keys: {', '.join(sorted(keys))}",
            action=name,
        )
    if kind == "email" and given.get("user"):
        given["password"] = smtp_password
    try:
        return made(**given)
    except TypeError as error:
        raise ConfigurationError(f"the action {name} is not complete: {error}", action=name) from error


def check_actions(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigurationError if an action of a file of rules is not understood, before the job starts."""
    for name, table in tables.items():
        make_action(name, table, ask_launcher=lambda text: None)


def _plan_change(name: str, given: Mapping[str, Any]) -> RunningChange:
    # Imported here: a plan is pydantic, which most files of rules do without.
    from torsh_distributed.plan.running_change import RunningChange

    try:
        return RunningChange.from_dict(given)
    except ConfigurationError as error:
        raise ConfigurationError(f"the action {name}: {error.message}", hint=error.hint, action=name) from error
