"""A few calls of the Kubernetes API over HTTPS, with errors that say what the server said."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

from torsh_distributed.clusters.kubernetes.cluster_access import ClusterAccess
from torsh_distributed.clusters.kubernetes.pod_template import Manifest
from torsh_distributed.errors import (
    CommunicationError,
    ConfigurationError,
    FeatureNotAvailable,
    InvalidArgument,
    JobNotFound,
    OperationTimeout,
    TorshError,
)

REQUEST_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 1 << 26
_PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "PyTorchJob": "pytorchjobs",
    "Pod": "pods",
    "Service": "services",
    "Secret": "secrets",
    "ConfigMap": "configmaps",
}
_INSTALL = {
    "jobset.x-k8s.io": "install JobSet (jobset.sigs.k8s.io), or use --set kind=job",
    "trainer.kubeflow.org": "install Kubeflow Trainer v2, or use --set kind=job",
    "kubeflow.org": "install Kubeflow's training operator v1, or use --set kind=job",
}


class ObjectNotFound(JobNotFound):
    """The server has no object of that name."""


class ApiServer:
    """One connection per call: calls are few, and a server that was away is found again."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access

    @property
    def namespace(self) -> str:
        """Where objects go that name no namespace."""
        return self._access.namespace

    def create(self, manifest: Manifest, namespace: str) -> Manifest:
        """Create the object; fields that the server does not know are refused, not dropped."""
        path = f"{collection(manifest['apiVersion'], manifest['kind'], namespace)}?fieldValidation=Strict"
        return self._call("POST", path, manifest, what=f"create {_name(manifest)}")

    def read(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object as it is now; None if there is none."""
        return self._maybe("GET", f"{collection(api, kind, namespace)}/{quote(name)}", what=f"read {kind} {name}")

    def find(self, api: str, kind: str, namespace: str, selector: str) -> tuple[list[Manifest], str]:
        """The objects with these labels, and the version that this is true for."""
        path = f"{collection(api, kind, namespace)}?{urlencode({'labelSelector': selector})}"
        answer = self._call("GET", path, what=f"list objects of kind {kind}")
        found = [one for one in answer.get("items", []) if isinstance(one, dict)]
        return found, str(answer.get("metadata", {}).get("resourceVersion", ""))

    def change(self, api: str, kind: str, namespace: str, name: str, changes: Manifest) -> Manifest:
        """Merge the changes into the object."""
        path = f"{collection(api, kind, namespace)}/{quote(name)}?fieldValidation=Strict"
        return self._call("PATCH", path, changes, what=f"change {kind} {name}", content="application/merge-patch+json")

    def delete(self, api: str, kind: str, namespace: str, name: str) -> bool:
        """Remove the object after everything that it owns; False if there was none."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        path = f"{collection(api, kind, namespace)}/{quote(name)}"
        return self._maybe("DELETE", path, options, what=f"remove {kind} {name}") is not None

    def watch(
        self, api: str, kind: str, namespace: str, *, since: str, timeout_s: float, **selectors: str
    ) -> Iterator[tuple[str, Manifest]]:
        """What happens to the objects (`ADDED`, `MODIFIED`, `DELETED`) after the version `since`; ends in time."""
        limits = {"resourceVersion": since, "timeoutSeconds": str(max(1, round(timeout_s)))}
        query = urlencode({"watch": "true", **limits, **selectors})
        path, what = f"{collection(api, kind, namespace)}?{query}", f"watch objects of kind {kind}"
        limit_s = timeout_s + REQUEST_TIMEOUT_S
        for line in self._lines(path, what, timeout_s=limit_s):
            event = _parsed(line)
            if not isinstance(event.get("object"), dict):
                raise CommunicationError(f"the API server could not {what}: {event.get('message')}")
            yield str(event.get("type")), event["object"]

    def log_lines(self, namespace: str, pod: str, *, follow: bool) -> Iterator[str]:
        """The output of a pod; with `follow` until its container ends."""
        query = urlencode({"follow": "true"} if follow else {})
        path = f"{collection('v1', 'Pod', namespace)}/{quote(pod)}/log?{query}"
        what = f"read the output of pod {pod}"
        for line in self._lines(path, what, timeout_s=None if follow else REQUEST_TIMEOUT_S):
            yield line.decode(errors="replace").rstrip("\n")

    def _lines(self, path: str, what: str, *, timeout_s: float | None) -> Iterator[bytes]:
        """The lines of an answer as they arrive; no one of them later than `timeout_s`, None for a job's silence."""
        with self._response("GET", path, None, what=what, timeout_s=timeout_s) as response:
            if response.status != http.HTTPStatus.OK:
                raise self._refused(response.status, _parsed(response.read(_MAX_ANSWER_BYTES)), what, path)
            try:
                while line := response.readline(_MAX_ANSWER_BYTES):
                    yield line
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error, what) from error

    def _maybe(self, method: str, path: str, body: Manifest | None = None, *, what: str) -> Manifest | None:
        try:
            return self._call(method, path, body, what=what)
        except ObjectNotFound:
            return None

    def _call(
        self, method: str, path: str, body: Manifest | None = None, *, what: str, content: str = "application/json"
    ) -> Manifest:
        with self._response(method, path, body, what=what, content=content) as response:
            try:
                raw = response.read(_MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error, what) from error
            answer = _parsed(raw)
            if response.status >= http.HTTPStatus.BAD_REQUEST:
                raise self._refused(response.status, answer, what, path)
            return answer

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: Manifest | None,
        *,
        what: str,
        content: str = "application/json",
        timeout_s: float | None = REQUEST_TIMEOUT_S,
    ) -> Iterator[http.client.HTTPResponse]:
        access = self._access
        connection = http.client.HTTPSConnection(
            access.host, access.port, timeout=REQUEST_TIMEOUT_S, context=access.tls
        )
        headers = {"Accept": "application/json", "User-Agent": "torsh"}
        if access.token is not None:
            headers["Authorization"] = f"Bearer {access.token}"
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), content
        try:
            try:
                connection.request(method, access.path + path, body=data, headers=headers)
                response = connection.getresponse()
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error, what) from error
            yield response
        finally:
            connection.close()

    def _lost(self, error: Exception, what: str) -> TorshError:
        where = self._access.address
        if isinstance(error, ssl.SSLCertVerificationError):
            return CommunicationError(
                f"the API server at {where} has a certificate that is not trusted: {error.verify_message}",
                hint="the kubeconfig's certificate-authority must be the cluster's",
                server=where,
            )
        if isinstance(error, TimeoutError):
            return OperationTimeout(
                f"the API server at {where} did not answer within {REQUEST_TIMEOUT_S:g} s",
                operation=what,
                server=where,
            )
        reason = str(error.strerror or error) if isinstance(error, OSError) else repr(error)
        if isinstance(error, socket.gaierror):
            reason = "its name cannot be resolved"
        return CommunicationError(
            f"the API server at {where} cannot be reached to {what}: {reason}",
            hint="`kubectl version` uses the same address; is the VPN up, and the kubeconfig current?",
            server=where,
        )

    def _refused(self, status: int, answer: Manifest, what: str, path: str) -> TorshError:
        said = str(answer.get("message") or http.client.responses.get(status, status))
        facts: dict[str, Any] = {"server": self._access.address, "status": status}
        match status:
            case http.HTTPStatus.UNAUTHORIZED:
                return ConfigurationError(
                    f"the API server does not know who asks to {what}: {said}",
                    hint="the token or certificate of the kubeconfig may have expired: sign in again",
                    **facts,
                )
            case http.HTTPStatus.FORBIDDEN:
                return ConfigurationError(
                    f"this account may not {what}: {said}",
                    hint="ask for the role `edit` in the namespace, or use another one with --set namespace=…",
                    **facts,
                )
            case http.HTTPStatus.NOT_FOUND:
                # A path that the server does not serve at all has an answer without details.
                if (answer.get("details") or {}).get("name"):
                    return ObjectNotFound(f"the cluster could not {what}: {said}", **facts)
                hint = next((hint for group, hint in _INSTALL.items() if f"/apis/{group}/" in path), None)
                return FeatureNotAvailable(f"the cluster cannot {what}: it has no such kind", hint=hint, **facts)
            case http.HTTPStatus.CONFLICT:
                return InvalidArgument(
                    f"the cluster could not {what}: {said}",
                    hint="a job of this name exists already: choose another --name, or `torsh cancel` the other",
                    **facts,
                )
            case http.HTTPStatus.UNPROCESSABLE_ENTITY | http.HTTPStatus.BAD_REQUEST:
                return InvalidArgument(f"the API server refuses to {what}: {said}", **facts)
        return CommunicationError(f"the API server could not {what}: {said}", **facts)


def collection(api: str, kind: str, namespace: str) -> str:
    """The path of the objects of a kind."""
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return f"{root}/namespaces/{quote(namespace)}/{_PLURALS[kind]}"


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _parsed(raw: bytes) -> Manifest:
    """The answer; what is not JSON (a proxy's page) is its message."""
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"message": raw[:200].decode(errors="replace").strip()}
