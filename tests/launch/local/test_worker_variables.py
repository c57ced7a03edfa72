from __future__ import annotations

import dataclasses
from pathlib import Path

from torsh_distributed.launch.local.worker_variables import (
    STARTUP_DIRECTORY,
    AttemptEndpoint,
    sets_omp_threads,
    worker_environment,
)
from torsh_distributed.launch.spec import Entry, JobSpec
from torsh_distributed.launch.worker.environment import read_environment

ENDPOINT = AttemptEndpoint(attempt=2, master_addr="10.0.0.1", master_port=4000)


def environment(spec: JobSpec, base: dict[str, str] | None = None, *, local_rank: int = 0) -> dict[str, str]:
    return worker_environment(
        spec,
        spec.places()[local_rank],
        ENDPOINT,
        base=base or {},
        mark="m",
        secret_file=Path("/s"),
        progress_file=Path("/p"),
    )


def spec(**changes: object) -> JobSpec:
    values: dict[str, object] = {"nnodes": 2, "node_rank": 1, "nproc_per_node": 3, "max_restarts": 4, "run_id": "r"}
    return JobSpec(entry=Entry(target="t.py"), **{**values, **changes})  # type: ignore[arg-type]


def test_a_worker_finds_the_variables_of_torchrun_and_ours() -> None:
    assert environment(spec(), local_rank=2) == {
        "RANK": "5",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "4",
        "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "256",
        "OMP_NUM_THREADS": "1",
        "TORSH_BEAT_S": "1.0",
        "TORSH_LAUNCHER": "run",
        "TORSH_PROGRESS_FILE": "/p",
        "TORSH_SECRET_FILE": "/s",
        "TORSH_STORE": "tcp://10.0.0.1:4000",
        "PYTHONPATH": str(STARTUP_DIRECTORY),
        "TORSH_JOB_MARKS": "m",
    }


def test_backends_are_told_the_interface_unless_the_user_named_one() -> None:
    endpoint = dataclasses.replace(ENDPOINT, interface="eth1")

    def told(**base: str) -> tuple[str | None, str | None]:
        one = worker_environment(
            spec(),
            spec().places()[0],
            endpoint,
            base=base,
            mark="m",
            secret_file=Path("/s"),
            progress_file=Path("/p"),
        )
        return one.get("GLOO_SOCKET_IFNAME"), one.get("NCCL_SOCKET_IFNAME")

    assert told() == ("eth1", "=eth1")
    assert told(GLOO_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="ib1") == ("ib0", "ib1")


def test_what_is_written_here_is_what_the_worker_reads() -> None:
    found = read_environment(environment(spec(), local_rank=1))
    assert (found.source, found.rank, found.world_size, found.local_rank, found.local_world_size) == (
        "torsh run",
        4,
        6,
        1,
        3,
    )
    assert (found.node_rank, found.master_addr, found.master_port, found.attempt) == (1, "10.0.0.1", 4000, 2)
    assert found.has_agent_store


def test_the_launchers_own_environment_is_passed_on_but_not_its_rank() -> None:
    found = environment(spec(), {"HOME": "/h", "RANK": "9", "TORSH_RANK": "9", "TORSH_MASTER_PORT": "1"})
    assert found["HOME"] == "/h"
    assert found["RANK"] == "3"
    assert "TORSH_RANK" not in found
    assert "TORSH_MASTER_PORT" not in found


def test_variables_of_the_spec_win() -> None:
    assert environment(spec(env={"MASTER_ADDR": "other", "X": "1"}), {"X": "0"})["MASTER_ADDR"] == "other"
    assert environment(spec(env={"X": "1"}), {"X": "0"})["X"] == "1"


def test_a_job_inside_a_job_carries_both_marks() -> None:
    assert environment(spec(), {"TORSH_JOB_MARKS": "outer"})["TORSH_JOB_MARKS"] == "outer:m"


def test_threads_are_limited_only_where_the_user_said_nothing_and_workers_share_the_node() -> None:
    assert sets_omp_threads(spec(), {})
    assert not sets_omp_threads(spec(nproc_per_node=1), {})
    assert environment(spec(), {"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert environment(spec(env={"OMP_NUM_THREADS": "6"}))["OMP_NUM_THREADS"] == "6"


def test_a_secret_of_the_launcher_is_not_in_the_variables_of_workers() -> None:
    base = {"TORSH_JOB_TOKEN": "hidden", "TORSH_SECRET_FILE": "/another", "TORSH_STORE": "tcp://another:1", "KEPT": "1"}
    env = environment(spec(), base)
    assert "hidden" not in " ".join(env.values())
    assert (env["TORSH_SECRET_FILE"], env["TORSH_STORE"], env["KEPT"]) == ("/s", "tcp://10.0.0.1:4000", "1")
    assert "TORSH_JOB_TOKEN" not in env


def test_workers_beside_the_store_use_its_unix_socket_and_torchs_store_has_no_address() -> None:
    local = AttemptEndpoint(attempt=0, master_addr="::1", master_port=4000, local_store="/run/job/store-0")
    assert local.store_url == "unix:///run/job/store-0"
    assert AttemptEndpoint(attempt=0, master_addr="::1", master_port=4000).store_url == "tcp://[::1]:4000"
    assert "TORSH_STORE" not in environment(spec(serves_torch_store=True))


def test_the_users_pythonpath_stays_behind_ours() -> None:
    assert environment(spec(), {"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{STARTUP_DIRECTORY}:/mine"
