"""A few calls of the Kubernetes API by the package kubernetes, with errors that say what the server said."""

from __future__ import annotations

import contextlib
import http
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

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
    first_line,
)

REQUEST_TIMEOUT_S = 30.0
_MAX_ANSWER_BYTES = 1 << 26
_STRICT = {"fieldValidation": "Strict"}
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
    """Objects by kind and name. Every call is one request, tried once, and has a deadline."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access

    @property
    def namespace(self) -> str:
        """Where objects go that name no namespace."""
        return self._access.namespace

    def create(self, manifest: Manifest, namespace: str) -> Manifest:
        """Create the object; fields that the server does not know are refused, not dropped."""
        path = collection(manifest["apiVersion"], manifest["kind"], namespace)
        return self._call("POST", path, manifest, what=f"create {_name(manifest)}", query=_STRICT)

    def read(self, api: str, kind: str, namespace: str, name: str) -> Manifest | None:
        """The object as it is now; None if there is none."""
        return self._maybe("GET", f"{collection(api, kind, namespace)}/{quote(name)}", what=f"read {kind} {name}")

    def find(self, api: str, kind: str, namespace: str, selector: str) -> tuple[list[Manifest], str]:
        """The objects with these labels, and the version that this is true for."""
        what, query = f"list objects of kind {kind}", {"labelSelector": selector}
        answer = self._call("GET", collection(api, kind, namespace), what=what, query=query)
        found = [one for one in answer.get("items", []) if isinstance(one, dict)]
        return found, str(answer.get("metadata", {}).get("resourceVersion", ""))

    def change(self, api: str, kind: str, namespace: str, name: str, changes: Manifest) -> Manifest:
        """Merge the changes into the object."""
        path, what = f"{collection(api, kind, namespace)}/{quote(name)}", f"change {kind} {name}"
        return self._call("PATCH", path, changes, what=what, query=_STRICT, content="application/merge-patch+json")

    def delete(self, api: str, kind: str, namespace: str, name: str) -> bool:
        """Remove the object after everything that it owns; False if there was none."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        path = f"{collection(api, kind, namespace)}/{quote(name)}"
        return self._maybe("DELETE", path, options, what=f"remove {kind} {name}") is not None

    def watch(
        self, api: str, kind: str, namespace: str, *, since: str, timeout_s: float, **selectors: str
    ) -> Iterator[tuple[str, Manifest]]:
        """What happens to the objects (`ADDED`, `MODIFIED`, `DELETED`) after the version `since`; ends in time."""
        query = {"watch": "true", "resourceVersion": since, "timeoutSeconds": str(max(1, round(timeout_s)))}
        what, limit_s = f"watch objects of kind {kind}", timeout_s + REQUEST_TIMEOUT_S
        for line in self._lines(collection(api, kind, namespace), what, timeout_s=limit_s, **query, **selectors):
            event = _parsed(line)
            if not isinstance(event.get("object"), dict):
                raise CommunicationError(f"the API server could not {what}: {event.get('message')}")
            yield str(event.get("type")), event["object"]

    def log_lines(self, namespace: str, pod: str, *, follow: bool) -> Iterator[str]:
        """The output of a pod; with `follow` until its container ends."""
        path, what = f"{collection('v1', 'Pod', namespace)}/{quote(pod)}/log", f"read the output of pod {pod}"
        query = {"follow": "true"} if follow else {}
        for line in self._lines(path, what, timeout_s=None if follow else REQUEST_TIMEOUT_S, **query):
            yield line.decode(errors="replace").rstrip("\n")

    def _lines(self, path: str, what: str, *, timeout_s: float | None, **query: str) -> Iterator[bytes]:
        """The lines of an answer as they arrive; no one of them later than `timeout_s`, None for a job's silence."""
        import urllib3

        with self._response("GET", path, what=what, query=query) as response:
            if response.connection is not None:  # None: all of the answer is here
                response.connection.sock.settimeout(timeout_s)
            try:
                yield from response
            except urllib3.exceptions.HTTPError as error:
                raise self._lost(error, what) from error

    def _maybe(self, method: str, path: str, body: Manifest | None = None, *, what: str) -> Manifest | None:
        try:
            return self._call(method, path, body, what=what)
        except ObjectNotFound:
            return None

    def _call(self, method: str, path: str, body: Manifest | None = None, *, what: str, **options: Any) -> Manifest:
        import urllib3

        with self._response(method, path, body, what=what, **options) as response:
            try:
                return _parsed(response.read(_MAX_ANSWER_BYTES))
            except urllib3.exceptions.HTTPError as error:
                raise self._lost(error, what) from error

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: Manifest | None = None,
        *,
        what: str,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Iterator[Any]:
        import urllib3
        from kubernetes.client import ApiClient
        from kubernetes.dynamic import DynamicClient
        from kubernetes.dynamic.exceptions import DynamicApiError

        # A client for each call, and so a connection: calls are few, and a server that was away is found again.
        with ApiClient(self._access.settings) as client:
            client.user_agent = "torsh"
            try:
                # Without discovery, which is three calls more: the kinds are few and known.
                response = DynamicClient(client, discoverer=lambda *_: None).request(
                    method,
                    path,
                    body=body,
                    query_params=list((query or {}).items()),
                    content_type=content,
                    _request_timeout=(REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_S),
                    serialize=False,
                )
            except DynamicApiError as error:
                raise self._refused(error, what, path) from error
            except urllib3.exceptions.HTTPError as error:
                raise self._lost(error, what) from error
            with contextlib.closing(response):
                yield response

    def _lost(self, error: Exception, what: str) -> TorshError:
        from urllib3.exceptions import NameResolutionError, NewConnectionError
        from urllib3.exceptions import TimeoutError as NoAnswerInTime

        where = self._access.address
        if isinstance(error, NoAnswerInTime) and not isinstance(error, NewConnectionError):  # refused is one of them
            return OperationTimeout(
                f"the API server at {where} did not answer within {REQUEST_TIMEOUT_S:g} s",
                operation=what,
                server=where,
            )
        reason = "its name cannot be resolved" if isinstance(error, NameResolutionError) else first_line(error)
        return CommunicationError(
            f"the API server at {where} cannot be reached to {what}: {reason}",
            hint="`kubectl version` uses the same address; is the VPN up, and the kubeconfig current?",
            server=where,
        )

    def _refused(self, error: Any, what: str, path: str) -> TorshError:
        status, answer, where = error.status, _parsed(error.body or b""), self._access.address
        reason = str(error.reason).splitlines()[-1]
        if not status:  # of TLS, before any answer
            return CommunicationError(
                f"the API server at {where} has a certificate that is not trusted: {reason}",
                hint="the kubeconfig's certificate-authority must be the cluster's",
                server=where,
            )
        said = str(answer.get("message") or reason)
        facts: dict[str, Any] = {"server": where, "status": status}
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


def _parsed(raw: bytes | str) -> Manifest:
    """The answer; what is not JSON (a proxy's page) is its message."""
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    text = raw if isinstance(raw, str) else raw.decode(errors="replace")
    return answer if isinstance(answer, dict) else {"message": text[:200].strip()}
