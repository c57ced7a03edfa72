"""How a worker finds the launcher's store: by the job's own address, with the job's secret."""

from __future__ import annotations

import importlib
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import torsh_distributed  # noqa: F401 - wraps torch's function
from torsh_distributed.comm.meeting.job_store import job_store_url, open_job_store
from torsh_distributed.comm.meeting.rendezvous import open_store
from torsh_distributed.comm.store import Store, TcpStoreServer
from torsh_distributed.comm.trust.job_secret import write_secret_file
from torsh_distributed.errors import ConfigurationError

torch_rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
TIMEOUT = timedelta(seconds=10)


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TcpStoreServer:
    write_secret_file(tmp_path / "secret", "the job's")
    server = TcpStoreServer(token="the job's")
    monkeypatch.setenv("TORSH_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("TORSH_STORE", server.url)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "4000")
    yield server  # type: ignore[misc]  # a fixture
    server.close()


def test_the_jobs_own_address_is_the_launchers_store(member: TcpStoreServer) -> None:
    assert job_store_url("node0", 4000) == member.url
    assert job_store_url("node0", 4001) is None
    assert job_store_url("node1", 4000) is None


def test_torchs_env_and_our_init_meet_in_it(member: TcpStoreServer) -> None:
    theirs = torch_rendezvous._create_c10d_store("node0", 4000, 0, 2, TIMEOUT)
    ours = open_store("node0", 4000, is_host=False, timeout_s=10, has_torch_agent=True)
    assert isinstance(theirs, Store)
    assert isinstance(ours, Store)
    theirs.set("key", "value")
    assert ours.get("key") == b"value"
    theirs.close()
    ours.close()


def test_another_address_is_torchs_own_store(member: TcpStoreServer) -> None:
    store = torch_rendezvous._create_c10d_store("127.0.0.1", 0, 0, 1, TIMEOUT)
    assert isinstance(store, dist.TCPStore)


def test_a_process_without_the_secret_is_told(member: TcpStoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORSH_SECRET_FILE")
    with pytest.raises(ConfigurationError, match="asks for a secret"):
        open_job_store(member.url, TIMEOUT)


def test_a_rank_that_hosts_the_store_asks_for_the_secret(member: TcpStoreServer) -> None:
    with open_store("127.0.0.1", 0, is_host=True, timeout_s=10) as host:  # type: ignore[attr-defined]  # ours
        assert isinstance(host, Store)
        port = int(host.url.rpartition(":")[2])
        with open_store("127.0.0.1", port, is_host=False, timeout_s=10) as other:  # type: ignore[attr-defined]
            other.set("key", "value")
            assert host.get("key") == b"value"
