"""Where the API server is and who we are to it: a kubeconfig, or the account of the pod this runs in.

The package kubernetes reads both. It gives programs for signing in no deadline and only logs why one failed, goes on
without a user that is not there, and meets a useless certificate at the first call: here these are errors, at once.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from torsh_distributed import known_variables
from torsh_distributed.comm.serial_thread import SerialThread
from torsh_distributed.errors import ConfigurationError, IoError, missing_extra
from torsh_distributed.log_level import said_to_log
from torsh_distributed.unreadable_data import unreadable_as

_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_HINT = "set KUBECONFIG, or run `kubectl config view` to see what kubectl uses"
_SIGN_IN_TIMEOUT_S = 60.0
_MAX_CONFIG_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ClusterAccess:
    """An API server, and the proof of who asks."""

    settings: Any = field(repr=False)
    """The package's `Configuration`: address, certificates, token and how to renew it."""
    namespace: str = "default"

    @property
    def address(self) -> str:
        """For messages."""
        return str(self.settings.host)


def find_access(environ: Mapping[str, str], *, context: str | None = None) -> ClusterAccess:
    """The cluster that kubectl would use: KUBECONFIG, then ~/.kube/config, then the pod's own account."""
    given = environ.get("KUBECONFIG")
    home = Path(known_variables.text("HOME", environ))
    paths = [Path(part) for part in given.split(os.pathsep) if part] if given else [home / ".kube" / "config"]
    found = [path for path in paths if path.exists()]
    if found:
        return read_kubeconfig(*found, context=context)
    if given:
        raise IoError(f"KUBECONFIG names {given}, which is not there", hint=_HINT, path=given)
    if "KUBERNETES_SERVICE_HOST" in environ and _POD_NAMESPACE.exists():
        return _pod_access()
    raise ConfigurationError(
        "no Kubernetes cluster is configured: there is no kubeconfig, and this is no pod",
        hint=_HINT,
        looked_at=", ".join(map(str, paths)),
    )


def _pod_access() -> ClusterAccess:
    package = _package()
    settings = package.client.Configuration()
    with unreadable_as(ConfigurationError, "the account of this pod cannot be used"):
        package.config.load_incluster_config(client_configuration=settings)
        return ClusterAccess(settings=_checked_tls(settings), namespace=_POD_NAMESPACE.read_text().strip())


def read_kubeconfig(*paths: Path, context: str | None = None) -> ClusterAccess:
    """The cluster and the user of a context, the current one if None; several files are merged as kubectl does."""
    _package()
    from kubernetes.config import ConfigException

    named = os.pathsep.join(map(str, paths))
    for path in paths:
        _require_plain(path)
    with unreadable_as(ConfigurationError, "the kubeconfig cannot be understood", hint=_HINT, path=named):
        try:
            return _access(paths, context)
        except ConfigException as error:  # its text may quote an entry, with the token in it
            raise ConfigurationError(str(error).partition("{")[0].strip(), hint=_HINT, path=named) from None


def _access(paths: tuple[Path, ...], context: str | None) -> ClusterAccess:
    from kubernetes.client import Configuration
    from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

    named = os.pathsep.join(map(str, paths))
    merged = KubeConfigMerger(named).config
    # The first file that names a context decides, as for kubectl; the package would take the last.
    each = [KubeConfigMerger(str(path)).config for path in paths] if context is None else []
    context = context or next(filter(None, (one.safe_get("current-context") for one in each)), None)
    loader = KubeConfigLoader(config_dict=merged, active_context=context, config_base_path=None)
    chosen = loader.current_context["context"]
    server = merged["clusters"].get_with_name(chosen["cluster"])["cluster"].safe_get("server")
    if urlsplit(str(server)).scheme != "https":
        raise ConfigurationError(
            "the API server's address must begin with https://: without TLS the token would be readable on the way",
            server=server,
            path=named,
        )
    user = merged["users"].get_with_name(chosen["user"])["user"] if chosen.get("user") else {}
    if "auth-provider" in user or "username" in user:
        raise ConfigurationError(
            "this kubeconfig uses a way to sign in that Kubernetes no longer has (auth-provider, username)",
            hint="use a token, a client certificate or an exec plugin",
            path=named,
        )
    settings = Configuration()
    said = _sign_in(loader, settings, named)
    if "exec" in user and not settings.auth_settings() and settings.cert_file is None:
        raise ConfigurationError(
            f"the kubeconfig's program for signing in failed: {' '.join(said)[-300:]}",
            hint=str(user["exec"].safe_get("installHint") or f"run `{user['exec']['command']}` by hand to see why"),
            path=named,
        )
    return ClusterAccess(settings=_checked_tls(settings), namespace=str(chosen.get("namespace") or "default"))


def _require_plain(path: Path) -> None:
    """Refuse what is not a file of a few megabytes, and aliases: the package writes them out, gigabytes for bytes."""
    with unreadable_as(ConfigurationError, "the kubeconfig cannot be read", hint=_HINT, path=str(path)):
        if not path.is_file() or path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigurationError("this is not a kubeconfig", hint=_HINT, path=str(path))
        tokens = yaml.scan(path.read_text(), Loader=yaml.SafeLoader)
        if any(isinstance(token, yaml.AliasToken) for token in tokens):
            raise ConfigurationError("the kubeconfig has YAML aliases, which are not read", path=str(path))


def _package() -> Any:
    try:
        import kubernetes
    except ImportError as error:
        raise missing_extra("k8s", "asking a Kubernetes cluster") from error
    return kubernetes


def _sign_in(loader: Any, settings: Any, path: str) -> list[str]:
    """Fill in address, certificates and token; returns what the package logged. A program may want a person."""

    def load() -> list[str]:
        with said_to_log(None) as said:
            loader.load_and_set(settings)
        return said

    try:
        return SerialThread("torsh-k8s-sign-in").submit(load).result(timeout=_SIGN_IN_TIMEOUT_S)
    except TimeoutError as error:
        raise ConfigurationError(
            f"the kubeconfig's program for signing in did not end within {_SIGN_IN_TIMEOUT_S:g} s", path=path
        ) from error


def _checked_tls(settings: Any) -> Any:
    """The settings of a client that tries a call once, if its certificates can be used."""
    settings.retries = False
    try:
        trust = ssl.create_default_context(cafile=settings.ssl_ca_cert)
        if settings.cert_file is not None:
            trust.load_cert_chain(settings.cert_file, settings.key_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"a certificate or key of the kubeconfig cannot be used: {error}", hint=_HINT, server=settings.host
        ) from error
    return settings
