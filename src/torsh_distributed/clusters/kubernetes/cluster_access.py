"""Where the API server is and who we are to it: a kubeconfig, or the account of the pod this runs in."""

from __future__ import annotations

import base64
import binascii
import json
import os
import ssl
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torsh_distributed import known_variables
from torsh_distributed.errors import ConfigurationError, IoError
from torsh_distributed.unreadable_data import unreadable_as

_POD_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HINT = "set KUBECONFIG, or run `kubectl config view` to see what kubectl uses"
_PLUGIN_TIMEOUT_S = 60.0
_MAX_CONFIG_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """An API server, and the proof of who asks."""

    host: str
    port: int
    path: str = ""
    """What precedes every path, where the server is behind a proxy."""
    namespace: str = "default"
    tls: ssl.SSLContext = field(repr=False)
    token: str | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """For messages."""
        return f"https://{self.host}:{self.port}{self.path}"


def find_access(environ: Mapping[str, str], *, context: str | None = None) -> ClusterAccess:
    """The cluster that kubectl would use: KUBECONFIG, then ~/.kube/config, then the pod's own account."""
    given = environ.get("KUBECONFIG")
    paths = [Path(part) for part in given.split(os.pathsep) if part] if given else [_home(environ) / ".kube" / "config"]
    for path in paths:
        if path.exists():
            return read_kubeconfig(path, context=context)
    if given:
        raise IoError(f"KUBECONFIG names {given}, which is not there", hint=_HINT, path=given)
    if "KUBERNETES_SERVICE_HOST" in environ and (_POD_ACCOUNT / "token").exists():
        return _pod_access(environ)
    raise ConfigurationError(
        "no Kubernetes cluster is configured: there is no kubeconfig, and this is no pod",
        hint=_HINT,
        looked_at=", ".join(map(str, paths)),
    )


def _home(environ: Mapping[str, str]) -> Path:
    return Path(known_variables.text("HOME", environ))


def _pod_access(environ: Mapping[str, str]) -> ClusterAccess:
    return ClusterAccess(
        host=environ["KUBERNETES_SERVICE_HOST"],
        port=known_variables.whole_number("KUBERNETES_SERVICE_PORT", environ),
        namespace=(_POD_ACCOUNT / "namespace").read_text().strip(),
        tls=ssl.create_default_context(cafile=str(_POD_ACCOUNT / "ca.crt")),
        token=(_POD_ACCOUNT / "token").read_text().strip(),
    )


def read_kubeconfig(path: Path, *, context: str | None = None) -> ClusterAccess:
    """The cluster and the user of a context, the current one if None."""
    with unreadable_as(ConfigurationError, "the kubeconfig cannot be understood", hint=_HINT, path=str(path)):
        return _access(_load(path), path, context)


def _access(config: dict[str, Any], path: Path, context: str | None) -> ClusterAccess:
    name = context or config.get("current-context")
    chosen = _named(config, "contexts", name, path).get("context", {})
    cluster = _named(config, "clusters", chosen.get("cluster"), path).get("cluster", {})
    user = _named(config, "users", chosen.get("user"), path).get("user", {}) if chosen.get("user") else {}
    server = urlsplit(str(cluster.get("server", "")))
    if server.scheme != "https" or not server.hostname:
        raise ConfigurationError(
            "the API server's address must begin with https://: without TLS the token would be readable on the way",
            server=cluster.get("server"),
            path=str(path),
        )
    token, identity = _credentials(user, path)
    return ClusterAccess(
        host=server.hostname,
        port=server.port or 443,
        path=server.path.rstrip("/"),
        namespace=str(chosen.get("namespace") or "default"),
        tls=_tls(cluster, identity, path),
        token=token,
    )


def _load(path: Path) -> dict[str, Any]:
    import yaml

    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigurationError("the kubeconfig is too large to be one", path=str(path))
        text = path.read_text()
        # Aliases let a few bytes stand for gigabytes, and a kubeconfig needs none.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ConfigurationError("the kubeconfig has YAML aliases, which are not read", path=str(path))
        config = yaml.safe_load(text)
    except ConfigurationError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise IoError(f"the kubeconfig cannot be read: {error}", hint=_HINT, path=str(path)) from error
    if not isinstance(config, dict):
        raise ConfigurationError("this is no kubeconfig", hint=_HINT, path=str(path))
    return config


def _named(config: dict[str, Any], section: str, name: object, path: Path) -> dict[str, Any]:
    entries = [entry for entry in config.get(section) or [] if isinstance(entry, dict)]
    for entry in entries:
        if entry.get("name") == name:
            return entry
    known = ", ".join(str(entry.get("name")) for entry in entries) or "none"
    raise ConfigurationError(
        f"the kubeconfig has no entry {name!r} in {section}", hint=f"there are: {known}", path=str(path)
    )


@dataclass(frozen=True)
class _Identity:
    """A client's certificate and key, in PEM."""

    certificate: bytes
    key: bytes


def _credentials(user: dict[str, Any], path: Path) -> tuple[str | None, _Identity | None]:
    if "exec" in user:
        return _ask_plugin(user["exec"], path)
    if "auth-provider" in user or "username" in user:
        raise ConfigurationError(
            "this kubeconfig uses a way to sign in that Kubernetes no longer has (auth-provider, username)",
            hint="use a token, a client certificate or an exec plugin",
            path=str(path),
        )
    certificate = _pem(user, "client-certificate", path)
    key = _pem(user, "client-key", path)
    identity = _Identity(certificate, key) if certificate is not None and key is not None else None
    token = user.get("token")
    if token is None and user.get("tokenFile"):
        token = _read(path.parent / str(user["tokenFile"])).decode().strip()
    return (str(token) if token is not None else None), identity


def _ask_plugin(settings: dict[str, Any], path: Path) -> tuple[str | None, _Identity | None]:
    """Credentials from the program that a cloud's kubeconfig names (aws, gke-gcloud-auth-plugin, kubelogin)."""
    command = [str(settings.get("command")), *map(str, settings.get("args") or [])]
    variables = {str(one["name"]): str(one["value"]) for one in settings.get("env") or []}
    request = {"apiVersion": settings.get("apiVersion"), "kind": "ExecCredential", "spec": {"interactive": False}}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(request)},
            capture_output=True,
            text=True,
            timeout=_PLUGIN_TIMEOUT_S,
            check=True,
        )
        status = json.loads(done.stdout)["status"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigurationError(
            f"the kubeconfig's program for signing in failed: {str(said).strip()[-300:]}",
            hint=str(settings.get("installHint") or f"run `{command[0]}` by hand to see why"),
            command=command[0],
            path=str(path),
        ) from error
    identity = None
    if status.get("clientCertificateData") and status.get("clientKeyData"):
        identity = _Identity(status["clientCertificateData"].encode(), status["clientKeyData"].encode())
    return status.get("token"), identity


def _pem(section: dict[str, Any], key: str, path: Path) -> bytes | None:
    """What `key-data` holds in base64, or the file that `key` names."""
    data = section.get(f"{key}-data")
    if data is not None:
        try:
            return base64.b64decode(str(data), validate=True)
        except binascii.Error as error:
            raise ConfigurationError(f"{key}-data in the kubeconfig is not base64", path=str(path)) from error
    named = section.get(key)
    return _read(path.parent / str(named)) if named else None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IoError(f"a file that the kubeconfig names cannot be read: {error}", path=str(path)) from error


def _tls(cluster: dict[str, Any], identity: _Identity | None, path: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context()
        authority = _pem(cluster, "certificate-authority", path)
        if authority is not None:
            # The cluster's own authority alone, as kubectl does.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=authority.decode())
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if identity is not None:
            # OpenSSL reads a key from files only.
            with tempfile.TemporaryDirectory(prefix="torsh-k8s-") as folder:
                pem = Path(folder) / "identity.pem"
                pem.touch(mode=0o600)
                pem.write_bytes(identity.certificate + b"\n" + identity.key)
                context.load_cert_chain(pem)
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(
            f"a certificate or key of the kubeconfig cannot be used: {error}", hint=_HINT, path=str(path)
        ) from error
    return context
