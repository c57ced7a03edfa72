"""Every launcher's variables give the same facts, and broken ones an error that names them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from torsh_distributed.errors import ConfigurationError, RankOutOfBounds
from torsh_distributed.launch.worker.environment import (
    Environment,
    expand_nodes,
    expand_tasks,
    first_node,
    read_environment,
)

ELASTIC = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}


def test_torchrun_is_read_with_its_attempt_and_store() -> None:
    assert read_environment(ELASTIC) == Environment(
        source="torchrun",
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        master_addr="10.0.0.1",
        master_port=1234,
        attempt=2,
        has_agent_store=True,
    )


def test_torsh_run_is_told_from_torchrun() -> None:
    assert read_environment({**ELASTIC, "TORSH_LAUNCHER": "run"}).source == "torsh run"


@pytest.mark.parametrize(
    ("variables", "source", "local_rank", "addr"),
    [
        (OPEN_MPI, "Open MPI", 1, "10.0.0.1"),
        (MPICH, "MPICH", 3, "127.0.0.1"),
        (SLURM, "SLURM", 1, "gpu007"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "RANK and WORLD_SIZE", None, "127.0.0.1"),
    ],
)
def test_each_launcher_gives_the_same_rank(
    variables: dict[str, str], source: str, local_rank: int | None, addr: str
) -> None:
    found = read_environment(variables)
    assert (found.source, found.rank, found.world_size) == (source, 3, 4)
    assert (found.local_rank, found.master_addr) == (local_rank, addr)


def test_nothing_means_a_world_of_one() -> None:
    found = read_environment({})
    assert (found.rank, found.world_size) == (0, 1)
    assert "world of one" in str(found)


def test_variables_set_by_hand_win_over_mpi_and_slurm() -> None:
    found = read_environment({**OPEN_MPI, **SLURM, "RANK": "0", "WORLD_SIZE": "2"})
    assert (found.source, found.rank, found.world_size) == ("RANK and WORLD_SIZE", 0, 2)


def test_a_batch_script_is_not_a_rank_of_slurm() -> None:
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_environment(batch).world_size == 1


def test_slurm_jobs_get_ports_of_their_own() -> None:
    other = {**SLURM, "SLURM_JOB_ID": "78"}
    assert read_environment(SLURM).master_port != read_environment(other).master_port


def test_torsh_variables_override_single_values() -> None:
    found = read_environment({**MPICH, "TORSH_RANK": "1", "TORSH_MASTER_PORT": "4000"})
    assert (found.rank, found.world_size, found.master_port) == (1, 4, 4000)
    assert found.source == "MPICH, TORSH_* for rank, master_port"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "at least one rank"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "local_rank must be below"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "between 1 and 65535"),
        ({k: v for k, v in OPEN_MPI.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not set"),
    ],
)
def test_broken_variables_are_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_environment(variables)


def test_a_rank_beyond_the_world_is_refused_with_the_numbers() -> None:
    with pytest.raises(RankOutOfBounds, match="rank 2 is outside the world of 2: ranks are 0 to 1"):
        read_environment({"RANK": "2", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[007-012,20],login", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("n1,n2", "n1"),
        ("solo", "solo"),
        ("rack[1-2]-a", "rack1-a"),
    ],
)
def test_the_first_node_is_read_from_slurms_list(nodelist: str, first: str) -> None:
    assert first_node(nodelist) == first


def pbs(folder: Path, **changes: str) -> dict[str, str]:
    """A task of pbsdsh on the second line of its host."""
    (folder / "nodes").write_text("gpu1\ngpu1\ngpu2\ngpu2\n")
    given = {"PBS_NODEFILE": str(folder / "nodes"), "PBS_VNODENUM": "3", "PBS_TASKNUM": "5", "PBS_JOBID": "30007.head"}
    return {**given, **changes}


def test_tasks_of_pbs_are_the_lines_of_its_node_file(tmp_path: Path) -> None:
    found = read_environment(pbs(tmp_path))
    assert (found.source, found.rank, found.world_size, found.master_addr) == ("PBS", 3, 4, "gpu1")
    assert (found.local_rank, found.local_world_size, found.node_rank, found.master_port) == (1, 2, 1, 20007)


def test_a_batch_script_of_pbs_is_no_rank(tmp_path: Path) -> None:
    assert read_environment(pbs(tmp_path, PBS_VNODENUM="0", PBS_TASKNUM="1")).world_size == 1


def test_a_node_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="PBS_VNODENUM is 4, but PBS_NODEFILE has 4 lines"):
        read_environment(pbs(tmp_path, PBS_VNODENUM="4"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_environment(pbs(tmp_path, PBS_NODEFILE=str(tmp_path / "none")))


LISTS = {
    "solo": ["solo"],
    "gpu[007-009,20],login": ["gpu007", "gpu008", "gpu009", "gpu20", "login"],
    "n1,n3": ["n1", "n3"],
    "rack[1-2]n[01,03]": ["rack1n01", "rack1n03", "rack2n01", "rack2n03"],
    "a[8-11]-ib,b[1-2].x": ["a8-ib", "a9-ib", "a10-ib", "a11-ib", "b1.x", "b2.x"],
}


@pytest.mark.parametrize("nodelist", LISTS)
def test_a_list_is_expanded_in_order(nodelist: str) -> None:
    assert expand_nodes(nodelist) == LISTS[nodelist]


@pytest.mark.needs_command("scontrol")
@pytest.mark.parametrize("nodelist", [text for text in LISTS if "-ib" not in text])  # SLURM itself knows no suffixes
def test_slurm_reads_the_list_alike(nodelist: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = tmp_path_factory.mktemp("conf") / "slurm.conf"
    config.write_text("ClusterName=x\nSlurmctldHost=x\nNodeName=x\n")
    done = subprocess.run(
        [shutil.which("scontrol") or "scontrol", "show", "hostnames", nodelist],
        capture_output=True,
        text=True,
        env={"SLURM_CONF": str(config)},
    )
    assert done.stdout.split() == expand_nodes(nodelist), done.stderr


@pytest.mark.parametrize("nodelist", ["", "a[1-2", "a]1[", "a[[1]]", "a[x-y]", "a[3-1]", "a,,b", "a[1-999999999]"])
def test_what_is_no_list_is_refused(nodelist: str) -> None:
    with pytest.raises(ConfigurationError, match="node list cannot be read"):
        expand_nodes(nodelist)


def test_tasks_per_node_may_differ() -> None:
    assert expand_tasks("4(x2),1") == [4, 4, 1]
    assert expand_tasks("2") == [2]
    with pytest.raises(ConfigurationError, match="cannot be read"):
        expand_tasks("4(x2")


def test_a_rank_knows_its_node_and_how_often_the_job_was_queued() -> None:
    found = read_environment(
        {
            "SLURM_PROCID": "8",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "9",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "2",
            "SLURM_STEP_NODELIST": "gpu[1-2],fat",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
            "SLURM_JOB_ID": "12",
            "SLURM_RESTART_COUNT": "3",
        }
    )
    assert (found.local_world_size, found.node_rank, found.master_addr, found.attempt) == (1, 2, "gpu1", 3)
