"""Where the API server is and who asks: kubeconfigs as clouds and people write them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from torsh_distributed.clusters.kubernetes.cluster_access import find_access, read_kubeconfig
from torsh_distributed.errors import ConfigurationError, IoError


def write(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    path = folder / "config"
    config = {
        "current-context": "one",
        "contexts": [
            {"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
            {"name": "two", "context": {"cluster": "c", "user": "missing"}},
        ],
        "clusters": [{"name": "c", "cluster": {"server": "https://k8s.example:6443/proxy/", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_token_and_a_place(tmp_path: Path) -> None:
    access = read_kubeconfig(write(tmp_path, {"token": "abc"}))
    assert (access.host, access.port, access.path, access.namespace) == ("k8s.example", 6443, "/proxy", "team")
    assert access.token == "abc"
    assert "abc" not in repr(access)


def test_a_token_from_a_file_and_from_a_program(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    assert read_kubeconfig(write(tmp_path, {"tokenFile": "token"})).token == "from-file"
    plugin = tmp_path / "plugin"
    answer = '{"kind": "ExecCredential", "status": {"token": "from-%s"}}'
    plugin.write_text(f"#!/bin/sh\nprintf '{answer}' \"$WHO\"\n")
    plugin.chmod(0o700)
    settings = {"command": str(plugin), "env": [{"name": "WHO", "value": "plugin"}]}
    assert read_kubeconfig(write(tmp_path, {"exec": settings})).token == "from-plugin"
    plugin.write_text("#!/bin/sh\necho sign in first >&2; exit 3\n")
    with pytest.raises(ConfigurationError, match="sign in first"):
        read_kubeconfig(write(tmp_path, {"exec": settings}))


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no entry 'missing' in users"):
        read_kubeconfig(write(tmp_path, {}), context="two")
    with pytest.raises(ConfigurationError, match="no entry 'three' in contexts"):
        read_kubeconfig(write(tmp_path, {}), context="three")
    with pytest.raises(ConfigurationError, match="https"):
        read_kubeconfig(write(tmp_path, {}, server="http://k8s.example"))
    with pytest.raises(ConfigurationError, match="not base64"):
        read_kubeconfig(write(tmp_path, {}, **{"certificate-authority-data": "%%"}))
    junk = base64.b64encode(b"junk").decode()
    with pytest.raises(ConfigurationError, match="certificate or key"):
        read_kubeconfig(write(tmp_path, {}, **{"certificate-authority-data": junk}))
    with pytest.raises(ConfigurationError, match="no longer has"):
        read_kubeconfig(write(tmp_path, {"username": "me"}))
    bomb = tmp_path / "bomb"
    bomb.write_text("a: &a [x]\nb: [*a, *a]\n")
    with pytest.raises(ConfigurationError, match="aliases"):
        read_kubeconfig(bomb)


def test_nothing_configured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no Kubernetes cluster is configured"):
        find_access({"HOME": str(tmp_path)})
    with pytest.raises(IoError, match="which is not there"):
        find_access({"KUBECONFIG": str(tmp_path / "none")})
