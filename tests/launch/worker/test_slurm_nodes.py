"""SLURM's lists of nodes and tasks, against SLURM's own reading where it is installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.launch.worker.environment import read_environment
from torsh_distributed.launch.worker.slurm_nodes import expand_nodes, expand_tasks

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
