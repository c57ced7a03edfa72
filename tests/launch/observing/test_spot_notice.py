"""Notices of the clouds, from a metadatour own server that answers as theirs do; and a job that leaves at one."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.bed.world import World
from tests.launch.jobs import launch, wait_for_text, write_script
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.observing.spot_notice import Cloud, SpotWatch, parse_cloud


class Metadata(ThreadingHTTPServer):
    """Answers `pages` by path; AWS's want the session token, the others their header."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, Any] = {}
        self.asked = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_PUT(self) -> None:
        is_right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._send(200 if is_right else 404, b"session")

    def do_GET(self) -> None:
        headers = self.headers
        may_ask = (
            headers["X-aws-ec2-metadata-token"] == "session"
            or headers["Metadata-Flavor"] == "Google"
            or headers["Metadata"] == "true"
        )
        page = self.server.pages.get(self.path.partition("?")[0])
        self._send(403 if not may_ask else 404 if page is None else 200, page or b"")
        self.server.asked.set()

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


AWS = "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance/preempted"
AZURE = "/metadata/scheduledevents"


def azure(kind: str, machine: str) -> bytes:
    return json.dumps({"Events": [{"EventType": kind, "Resources": [machine], "NotBefore": "soon"}]}).encode()


@pytest.mark.parametrize(
    ("cloud", "quiet", "notice"),
    [
        ("aws", {}, {AWS: b'{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'}),
        ("gcp", {GCP: b"FALSE"}, {GCP: b"TRUE"}),
        ("azure", {AZURE: azure("Reboot", "me_1")}, {AZURE: azure("Preempt", "me_1")}),
    ],
)
def test_a_notice_is_heard_and_the_rest_is_not(
    metadata: Metadata, cloud: Cloud, quiet: dict[str, bytes], notice: dict[str, bytes]
) -> None:
    name = {"/metadata/instance/compute/name": b"me_1"}
    metadata.pages = {**name, **quiet}
    with SpotWatch(cloud, address=metadata.address, every_s=0.01) as watch:
        assert metadata.asked.wait(10)
        assert watch.take() is None
        metadata.pages = {**name, **notice}
        assert select.select([watch.reports], [], [], 10)[0]
        said = watch.take()
    assert said is not None
    assert said[0]
    assert f"{cloud} takes this machine back" in said[1]


def test_another_machines_notice_is_not_ours(metadata: Metadata) -> None:
    metadata.pages = {"/metadata/instance/compute/name": b"me_1", AZURE: azure("Preempt", "me_2")}
    with SpotWatch("azure", address=metadata.address, every_s=0.01) as watch:
        for _ in range(3):
            metadata.asked.clear()
            assert metadata.asked.wait(10)
        assert watch.take() is None


def test_a_machine_without_metadata_says_so_once() -> None:
    with SpotWatch("gcp", address="http://127.0.0.1:1", every_s=0.001) as watch:
        assert select.select([watch.reports], [], [], 10)[0]
        said = watch.take()
        assert said is not None
        assert not said[0]
        assert "no metadata service answers" in said[1]
        assert watch.take() is None
    with pytest.raises(InvalidArgument, match="aws, gcp, azure"):
        parse_cloud("oracle")


def test_a_job_saves_and_ends_at_a_notice(world: World, tmp_path: Path, metadata: Metadata) -> None:
    script = write_script(
        tmp_path,
        """\
        def save(number, frame):
            leave(f"saved-{rank}", str(number))
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        leave(f"ready-{rank}", "yes")
        stay()
        """,
    )

    def notify() -> None:
        for rank in range(2):
            wait_for_text(tmp_path / f"ready-{rank}")
        metadata.pages = {AZURE: azure("Preempt", "me_1")}

    cloud = threading.Thread(target=notify)
    cloud.start()
    (outcome,) = launch(world, script, spot_notice="azure", env={"TORSH_METADATA_URL": metadata.address})
    cloud.join()
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == ["15", "15"]
    assert "azure takes this machine back: Preempt not before soon" in outcome.output
    assert outcome.value != 0, "the job is not done"
