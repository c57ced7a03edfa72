"""`torsh run --spot-notice aws|gcp|azure`: a cloud says that it takes the machine back, and the job saves and leaves.

A thread asks the machine's metadata service, which only the machine itself reaches. On a notice the launcher does what
it does at a batch system's SIGTERM: it forwards it on all nodes, so the Engine saves after its step and ends with the
code that asks to be started again. A cloud gives 30 seconds (GCP, Azure) to two minutes (AWS).
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args
from urllib.parse import urlsplit

from torsh_distributed import known_variables
from torsh_distributed.errors import InvalidArgument

Cloud = Literal["aws", "gcp", "azure"]
METADATA_VARIABLE = "TORSH_METADATA_URL"
"""Where the metadata service is, if it is not at the clouds' own address, the same for all three: behind a proxy, or
in a test."""

_ASK_EVERY_S: dict[Cloud, float] = {"aws": 5.0, "gcp": 2.0, "azure": 1.0}
_TIMEOUT_S = 2.0
_MAX_ANSWER_BYTES = 1 << 16
_TOKEN_LIFE_S = 21600
_UNTIL_SILENCE_IS_TOLD = 3

Fetch = Callable[[str, str, Mapping[str, str]], tuple[int, bytes]]
"""(method, path, headers) to status and body."""


def parse_cloud(text: str) -> Cloud:
    """The cloud of `--spot-notice`."""
    match text:
        case "aws" | "gcp" | "azure":
            return text
    raise InvalidArgument(f"--spot-notice must be one of {', '.join(get_args(Cloud))}", got=text)


def read_notice(cloud: Cloud, fetch: Fetch) -> str | None:
    """What the cloud says about taking the machine back; None if it keeps it. Raises OSError without an answer."""
    match cloud:
        case "aws":
            return _aws_notice(fetch)
        case "gcp":
            status, body = fetch("GET", "/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
            return "the instance is being preempted" if status == 200 and body.strip() == b"TRUE" else None
        case "azure":
            return _azure_notice(fetch)


def _aws_notice(fetch: Fetch) -> str | None:
    life = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_LIFE_S)}
    status, token = fetch("PUT", "/latest/api/token", life)
    headers = {"X-aws-ec2-metadata-token": token.decode()} if status == 200 else {}
    status, body = fetch("GET", "/latest/meta-data/spot/instance-action", headers)
    if status != 200:
        return None
    action = _json(body)
    return f"the instance is to {action.get('action', 'stop')} at {action.get('time', 'any moment')}"


def _azure_notice(fetch: Fetch) -> str | None:
    status, body = fetch("GET", "/metadata/instance/compute/name?api-version=2021-02-01&format=text", _AZURE)
    name = body.decode(errors="replace").strip() if status == 200 else None
    status, body = fetch("GET", "/metadata/scheduledevents?api-version=2020-07-01", _AZURE)
    for event in _json(body).get("Events", []) if status == 200 else []:
        is_ours = name is None or name in event.get("Resources", [name])
        if is_ours and event.get("EventType") in ("Preempt", "Terminate"):
            return f"{event['EventType']} not before {event.get('NotBefore') or 'any moment'}"
    return None


_AZURE = {"Metadata": "true"}


def _json(body: bytes) -> dict[str, Any]:
    """Any: the cloud's words."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class SpotWatch:
    """Asks on a thread while it is open; `reports` is readable when there is something to say."""

    def __init__(self, cloud: Cloud, *, address: str | None = None, every_s: float | None = None) -> None:
        self._cloud: Cloud = cloud
        self._address = urlsplit(address or known_variables.text(METADATA_VARIABLE))
        self._every_s = every_s if every_s is not None else _ASK_EVERY_S[cloud]
        self._closing = threading.Event()
        self.reports, self._thread_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._run, name="torsh-spot-notice", daemon=True)
        self._thread.start()

    def take(self) -> tuple[bool, str] | None:
        """(whether the machine is taken back, the words for it); None if nothing was said."""
        try:
            said = self.reports.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT).decode()
        except BlockingIOError:
            return None
        return said[:1] == "!", said[1:]

    def _run(self) -> None:
        num_silent = 0
        while not self._closing.is_set():
            notice = None
            try:
                notice = read_notice(self._cloud, self._fetch)
                num_silent = 0
            except (OSError, http.client.HTTPException) as error:
                num_silent += 1
                if num_silent == _UNTIL_SILENCE_IS_TOLD:
                    why = f"no metadata service answers ({error}); its notices do not arrive"
                    self._thread_end.send(f"?--spot-notice {self._cloud}: {why}".encode())
            if notice is not None:
                said = f"{self._cloud} takes this machine back: {notice}; the job saves and ends"
                self._thread_end.send(f"!{said}".encode())
                return
            self._closing.wait(self._every_s)

    def _fetch(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        # Not urllib: a proxy of the environment must not see these requests, nor answer them.
        connection = http.client.HTTPConnection(
            self._address.hostname or "", self._address.port or 80, timeout=_TIMEOUT_S
        )
        try:
            connection.request(method, path, headers=dict(headers))
            response = connection.getresponse()
            return response.status, response.read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()

    def close(self) -> None:
        """Stop asking."""
        self._closing.set()
        self._thread.join(timeout=3 * _TIMEOUT_S)
        self.reports.close()
        self._thread_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
