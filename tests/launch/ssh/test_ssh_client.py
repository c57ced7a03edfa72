"""`--hosts`, and what ssh is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec, Entry, JobSpec
from torsh_distributed.launch.ssh.host_order import HostOrder, carried_variables, read_signal, signal_line
from torsh_distributed.launch.ssh.ssh_client import (
    RemoteHost,
    SshClient,
    explain_failure,
    parse_hosts,
    workers_per_host,
)
from torsh_distributed.observe.settings import ObserveSettings


def test_hosts_are_read_with_their_workers() -> None:
    hosts = parse_hosts("a:4, me@b.example:4,[fd00::1]:2,c,[::1]")
    assert [(host.target, host.num_workers) for host in hosts] == [
        ("a", 4),
        ("me@b.example", 4),
        ("[fd00::1]", 2),
        ("c", None),
        ("[::1]", None),
    ]
    assert workers_per_host(parse_hosts("a:4,b"), default=4) == 4


@pytest.mark.parametrize("text", ["", "a,", "a:0", "a:x", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a:4:4", "me@-x"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="hosts must read NAME:WORKERS"):
        parse_hosts(text)


def test_hosts_that_repeat_or_differ_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="'a' is named twice"):
        parse_hosts("a:2,b:2,a:2")
    with pytest.raises(FeatureNotAvailable, match="same number of workers"):
        workers_per_host(parse_hosts("a:4,b:2"), default=1)


def test_an_order_travels_whole() -> None:
    spec = JobSpec(
        entry=Entry(target="x.py", args=("--lr", "1 2")),
        nnodes=2,
        master_addr="a",
        log_dir=Path("/l"),
        shown_ranks=frozenset({0}),
        token="the secret",
        env={"A": "ü\n"},
        elastic=ElasticSpec(max_workers=8),
        observe=ObserveSettings(exports=("jsonl:x",)),
        port_range=(1, 2),
    )
    order = HostOrder(directory="/w", env={"B": "2"}, spec=spec)
    line = order.to_line()
    assert line.count(b"\n") == 1
    assert HostOrder.from_line(line) == order
    assert read_signal(signal_line(15)) == 15
    assert read_signal(b"nonsense\n") is None


def test_what_training_reads_is_carried_and_the_secret_is_not() -> None:
    environ = {
        "PYTHONPATH": "/code",
        "NCCL_DEBUG": "INFO",
        "TORSH_LOG": "debug",
        "HOME": "/home/me",
        "MINE": "1",
        "TORSH_JOB_TOKEN": "secret",
        "TORSH_STATE_DIR": "/s",
    }
    assert carried_variables(environ) == {"PYTHONPATH": "/code", "NCCL_DEBUG": "INFO", "TORSH_LOG": "debug"}
    assert carried_variables(environ, ["MINE"])["MINE"] == "1"


@pytest.mark.needs_command("ssh")
def test_ssh_asks_for_nothing_and_checks_keys(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host a\n  HostName a.example\n")
    client = SshClient(config=tmp_path / "config", python="/opt/my python")
    command = client.command(RemoteHost(target="me@[fd00::1]"))
    assert command[-3:] == ["--", "me@fd00::1", "exec '/opt/my python' -m torsh_distributed.launch.ssh.host_start"]
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} <= set(command)
    assert client.host_name(RemoteHost(target="a")) == "a.example"
    assert os.environ.get("SSH_ASKPASS") is None or "BatchMode=yes" in command


def test_what_ssh_says_is_explained() -> None:
    host = RemoteHost(target="me@b")
    denied = explain_failure(host, ["x", "me@b: Permission denied (publickey)."])
    assert (denied.is_before_entry, "ssh-copy-id me@b" in denied.hint) == (True, True)
    broken = explain_failure(host, ["", "client_loop: send disconnect: Broken pipe"])
    assert (broken.said, broken.is_before_entry) == ("client_loop: send disconnect: Broken pipe", False)
    assert explain_failure(host, []).said == "the connection broke"
