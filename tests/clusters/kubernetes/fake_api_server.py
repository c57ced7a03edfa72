"""A stand-in for an API server: HTTPS, tokens, strict validation, objects that are kept. It is not Kubernetes.

What it does as the real one: it refuses objects that the published schemas refuse, a name that is taken, a token that
it does not know and a kind that is not installed; it keeps objects under their paths, gives them a uid, merges patches,
removes what a removed object owns, streams watches and the output of pods. What it lacks: controllers, scheduling,
kubelets. A test plays those: `pods_of` makes the pods of a Job, and `set_pod` says how they are.
"""

from __future__ import annotations

import json
import select
import ssl
import subprocess
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.clusters.kubernetes.schemas import VERSIONS, problem

TOKEN = "the-token-of-a-test"
_WAIT_S = 20.0
Object = dict[str, Any]


class FakeApiServer(ThreadingHTTPServer):
    """Runs on a thread while it is open."""

    daemon_threads = False
    block_on_close = True

    def __init__(self, folder: Path, *, version: str = VERSIONS[-1], missing: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.version, self.missing = folder, version, missing
        self.objects: dict[str, Object] = {}
        self.logs: dict[str, str] = {}
        self.refusals: dict[str, int] = {}
        """Paths whose creation fails with a status, for tests of what is left behind."""
        self.changed = threading.Condition()
        self.history: list[tuple[str, str, Object]] = []
        """Every change: what happened, to which path, and the object after it. Its length is the newest version."""
        self.is_closing = False
        self.requests: list[tuple[str, str]] = []
        certificate, key = folder / "server.pem", folder / "server.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})

    def kubeconfig(self, **user: Any) -> Path:
        """A file that leads here."""
        path = self.folder / "kubeconfig"
        cluster = {"server": f"https://127.0.0.1:{self.server_port}", "certificate-authority": "server.pem"}
        config = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "fake", "user": "me", "namespace": "team"}}],
            "clusters": [{"name": "fake", "cluster": cluster}],
            "users": [{"name": "me", "user": user or {"token": TOKEN}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def of_kind(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        with self.changed:
            return [one for one in self.objects.values() if one["kind"] == kind]

    def put(self, path: str, value: Object | None) -> None:
        """Create, replace or remove an object, as a controller would."""
        with self.changed:
            happened = "DELETED" if value is None else "MODIFIED" if path in self.objects else "ADDED"
            kept = json.loads(json.dumps(self.objects[path] if value is None else value))
            kept["metadata"]["resourceVersion"] = str(len(self.history) + 1)
            if value is None:
                del self.objects[path]
            else:
                self.objects[path] = kept
            self.history.append((happened, path, kept))
            self.changed.notify_all()

    def update(self, path: str, **parts: Any) -> None:
        """Merge into an object, as a controller would."""
        with self.changed:
            draft = json.loads(json.dumps(self.objects[path]))
            _merge(draft, parts)
            self.put(path, draft)

    def pods_of(self, job: Object, phase: str = "Running") -> list[str]:
        """The pods that the Job's controller would make; returns their paths."""
        paths = []
        for index in range(job["spec"]["completions"]):
            name, namespace = f"{job['metadata']['name']}-{index}-x", job["metadata"]["namespace"]
            template = job["spec"]["template"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "uid": str(uuid.uuid4()),
                    "labels": {
                        **template["metadata"]["labels"],
                        "batch.kubernetes.io/job-completion-index": str(index),
                    },
                    "ownerReferences": [{"uid": job["metadata"]["uid"]}],
                },
                "spec": template["spec"],
                "status": {"phase": phase},
            }
            path = f"/api/v1/namespaces/{namespace}/pods/{name}"
            self.put(path, pod)
            paths.append(path)
        return paths

    def remove(self, path: str) -> None:
        """Remove an object and what it owns, the owned first."""
        with self.changed:
            gone = self.objects[path]
            uid = gone["metadata"]["uid"]
            for other, one in list(self.objects.items()):
                if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", ())):
                    self.remove(other)
            self.put(path, None)

    def wait_until(self, is_so: Any) -> None:
        """Wait for a change after which `is_so()`."""
        with self.changed:
            assert self.changed.wait_for(is_so, timeout=_WAIT_S), "it did not happen"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closing = True
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeApiServer

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self._is_known():
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            if parts.path.endswith("/log"):
                self._log(parts.path.removesuffix("/log"), follow="follow" in query)
            elif "watch" in query:
                self._watch(parts.path, query)
            else:
                self._read(parts.path, query)

    def do_POST(self) -> None:
        if not self._is_known():
            return
        server, parts, given = self.server, urlsplit(self.path), self._body()
        path = f"{parts.path}/{given['metadata']['name']}"
        wrong = problem(given, server.version)
        with server.changed:
            if path in server.refusals:
                self._status(server.refusals[path], "it was told to fail")
            elif wrong is not None:
                self._status(422, f"{given['kind']} {given['metadata']['name']} is invalid: {wrong}")
            elif path in server.objects:
                self._status(409, f'"{given["metadata"]["name"]}" already exists')
            else:
                given["metadata"]["uid"] = str(uuid.uuid4())
                given["metadata"].setdefault("namespace", parts.path.split("/namespaces/")[1].split("/")[0])
                server.put(path, given)
                self._answer(201, server.objects[path])

    def do_PATCH(self) -> None:
        if not self._is_known():
            return
        server, path, changes = self.server, urlsplit(self.path).path, self._body()
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        with server.changed:
            if path not in server.objects:
                self._missing(path)
                return
            draft = json.loads(json.dumps(server.objects[path]))
            _merge(draft, changes)
            checked = {key: value for key, value in draft.items() if key != "status"}
            wrong = problem(checked, server.version)
            if wrong is not None:
                self._status(422, f"{draft['kind']} is invalid: {wrong}")
                return
            server.put(path, draft)
            self._answer(200, server.objects[path])

    def do_DELETE(self) -> None:
        if not self._is_known():
            return
        server, path, options = self.server, urlsplit(self.path).path, self._body()
        with server.changed:
            if path not in server.objects:
                self._missing(path)
                return
            assert options["propagationPolicy"] == "Foreground"
            server.update(path, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
            gone = server.objects[path]
            has_pods = any(
                one["kind"] == "Pod" and gone["metadata"]["uid"] in json.dumps(one["metadata"])
                for one in server.objects.values()
            )
            self._answer(200, gone)
            if not has_pods:
                server.remove(path)

    def _is_known(self) -> bool:
        """Whether the caller may ask, and the kind is served; otherwise he is told so."""
        self.server.requests.append((self.command, self.path))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._body()
            self._status(401, "Unauthorized")
            return False
        if any(f"/{group}/" in self.path for group in self.server.missing):
            self._body()
            self._send(404, b"404 page not found\n", "text/plain")
            return False
        return True

    def _read(self, path: str, query: dict[str, str]) -> None:
        with self.server.changed:
            if path in self.server.objects:
                self._answer(200, self.server.objects[path])
            elif path.rsplit("/", 2)[-2] == "namespaces" or not path.rsplit("/", 1)[-1].endswith("s"):
                self._missing(path)
            else:
                found = [one for other, one in self.server.objects.items() if _is_meant(path, other, one, query)]
                version = str(len(self.server.history))
                self._answer(200, {"kind": "List", "metadata": {"resourceVersion": version}, "items": found})

    def _watch(self, path: str, query: dict[str, str]) -> None:
        self._begin_stream()
        server = self.server
        sent = int(query["resourceVersion"])
        with server.changed:
            while True:
                try:
                    for happened, other, one in server.history[sent:]:
                        if _is_meant(path, other, one, query):
                            self._chunk(json.dumps({"type": happened, "object": one}).encode() + b"\n")
                except OSError:
                    return
                sent = len(server.history)
                server.changed.wait(timeout=0.2)
                if _is_gone(self.connection):
                    return
                if server.is_closing:
                    self.wfile.write(b"0\r\n\r\n")
                    return

    def _log(self, path: str, *, follow: bool) -> None:
        server = self.server
        with server.changed:
            if path not in server.objects:
                self._missing(path)
                return
        self._begin_stream()
        sent = 0
        while True:
            with server.changed:
                text = server.logs.get(path, "")
                is_over = server.objects.get(path, {}).get("status", {}).get("phase") != "Running"
                if len(text) == sent and not is_over and follow and not server.is_closing:
                    server.changed.wait(timeout=0.2)
                    continue
            self._chunk(text[sent:].encode())
            sent = len(text)
            if is_over or not follow or server.is_closing:
                self.wfile.write(b"0\r\n\r\n")
                return

    def _begin_stream(self) -> None:
        """Chunks of unknown number follow."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        if data:  # an empty one would be the last
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def _missing(self, path: str) -> None:
        name = path.rsplit("/", 1)[-1]
        self._status(404, f'"{name}" not found', details={"name": name})

    def _status(self, code: int, message: str, **more: Any) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code, **more})

    def _answer(self, code: int, value: Any) -> None:
        self._send(code, json.dumps(value).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _is_meant(path: str, other: str, one: Object, query: dict[str, str]) -> bool:
    if other.rsplit("/", 1)[0] != path:
        return False
    held = one["metadata"].get("labels", {})
    wanted = dict(pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair)
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(held.get(key) == value for key, value in wanted.items()) and name in ("", one["metadata"]["name"])


def _is_gone(connection: Any) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def _merge(value: Object, changes: Object) -> None:
    """RFC 7396."""
    for key, part in changes.items():
        if part is None:
            value.pop(key, None)
        elif isinstance(part, dict) and isinstance(value.get(key), dict):
            _merge(value[key], part)
        else:
            value[key] = part


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def documents(text: str) -> Iterator[Object]:
    """The objects of a YAML file."""
    yield from yaml.safe_load_all(text)
