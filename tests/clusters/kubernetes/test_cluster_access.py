"""Where the API server is and who asks: kubeconfigs as clouds and people write them."""

from __future__ import annotations

import base64
import json
import os
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from torsh_distributed.clusters.kubernetes import cluster_access
from torsh_distributed.clusters.kubernetes.cluster_access import ClusterAccess, find_access, read_kubeconfig
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, IoError

pytestmark = pytest.mark.needs_library("kubernetes")


def token_of(access: ClusterAccess) -> str:
    return str(access.settings.auth_settings()["BearerToken"]["value"])


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
    assert (access.address, access.namespace) == ("https://k8s.example:6443/proxy", "team")
    assert token_of(access) == "Bearer abc"
    assert "abc" not in repr(access)


def plugin_in(folder: Path, script: str) -> dict[str, Any]:
    plugin = folder / "plugin"
    plugin.write_text(f"#!/bin/sh\n{script}\n")
    plugin.chmod(0o700)
    api = "client.authentication.k8s.io/v1"
    return {"exec": {"apiVersion": api, "command": str(plugin), "env": [{"name": "WHO", "value": "plugin"}]}}


def test_a_token_from_a_file_and_from_a_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text("from-file")
    assert token_of(read_kubeconfig(write(tmp_path, {"tokenFile": "token"}))) == "Bearer from-file"
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "from-%s"}}
    user = plugin_in(tmp_path, f"printf '{json.dumps(answer)}' \"$WHO\"")
    assert token_of(read_kubeconfig(write(tmp_path, user))) == "Bearer from-plugin"
    user = plugin_in(tmp_path, "echo sign in first >&2; exit 3")
    with pytest.raises(ConfigurationError, match="sign in first"):
        read_kubeconfig(write(tmp_path, user))
    assert not caplog.records, "the error says it"


def test_a_program_that_waits_for_somebody_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_access, "_SIGN_IN_TIMEOUT_S", 0.2)
    os.mkfifo(gate := tmp_path / "gate")
    user = plugin_in(tmp_path, f"cat '{gate}'")
    with pytest.raises(ConfigurationError, match=r"did not end within 0.2 s"):
        read_kubeconfig(write(tmp_path, user))
    gate.write_text("over")


def test_several_files_are_one(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    whole = write(tmp_path / "mine", {"token": "abc"})
    other = tmp_path / "first"
    other.write_text(yaml.safe_dump({"current-context": "two", "users": [{"name": "missing", "user": {"token": "x"}}]}))
    access = find_access({"KUBECONFIG": f"{tmp_path / 'none'}{os.pathsep}{other}{os.pathsep}{whole}"})
    assert (token_of(access), access.namespace) == ("Bearer x", "default")


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing in .*config/users"):
        read_kubeconfig(write(tmp_path, {}), context="two")
    with pytest.raises(ConfigurationError, match=r"three in .*config/contexts"):
        read_kubeconfig(write(tmp_path, {}), context="three")
    with pytest.raises(ConfigurationError, match="https"):
        read_kubeconfig(write(tmp_path, {}, server="http://k8s.example"))
    for junk in ("%%", base64.b64encode(b"junk").decode()):
        with pytest.raises(ConfigurationError, match="certificate or key"):
            read_kubeconfig(write(tmp_path, {}, **{"certificate-authority-data": junk}))
    with pytest.raises(ConfigurationError, match="no longer has"):
        read_kubeconfig(write(tmp_path, {"username": "me"}))
    with pytest.raises(ConfigurationError, match="not a kubeconfig"):
        read_kubeconfig(tmp_path)


def test_an_error_quotes_no_token(tmp_path: Path) -> None:
    path = write(tmp_path, {})
    config = yaml.safe_load(path.read_text())
    config["users"] = [{"name": "u", "token": "s3cret"}]  # not under "user"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match="Expected key user") as caught:
        read_kubeconfig(path)
    assert "s3cret" not in "".join(traceback.format_exception(caught.value, chain=True))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "contexts:\n- &a [x]\n"
        + "".join(f"{new}: &{new} [*{old}, *{old}]\n" for old, new in pairwise("abcdefghijklmnopqrstuvwxyz")),
        "contexts: 7",
        "[]",
        "",
        "{",
        "contexts: [1]\ncurrent-context: one",
        "a: " + "[" * 1200,
    ],
    ids=["a bomb", "a number", "a list", "nothing", "half", "no name", "deep"],
)
def test_what_is_no_kubeconfig_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigurationError, match="kubeconfig"):
        read_kubeconfig(tmp_path / "config")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(FeatureNotAvailable, match=r"torsh-distributed\[k8s\]"):
        read_kubeconfig(write(tmp_path, {}))


def test_nothing_configured(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no Kubernetes cluster is configured"):
        find_access({"HOME": str(tmp_path)})
    with pytest.raises(IoError, match="which is not there"):
        find_access({"KUBECONFIG": str(tmp_path / "none")})
