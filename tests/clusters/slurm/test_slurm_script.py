"""The batch script: what is asked for is in it, and bash accepts it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from torsh_distributed.clusters.slurm.slurm_engine import SlurmEngine
from torsh_distributed.clusters.slurm.slurm_script import slurm_script
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import ElasticSpec, Entry


def submission(**changes: object) -> Submission:
    values = {"entry": Entry(target="train.py", args=("--name", "it's")), "name": "job", "working_dir": Path("/w")}
    return Submission(**{**values, **changes})  # type: ignore[arg-type]


def script(asked: Submission, **options: str) -> str:
    return slurm_script(asked, options, folder=Path("/s t/job"), command=["python", "a b"], env={"X": "1'2"})


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_resources_become_directives() -> None:
    asked = submission(
        nodes=2,
        workers_per_node=4,
        gpus_per_worker=1,
        cpus_per_worker=8,
        memory_per_worker="1.5G",
        time_limit_s=43_200,
    )
    found = directives(
        script(asked, partition="gpu", gpu_type="a100", signal_s="120", exclusive="yes", sbatch="--x --y=1")
    )
    for line in (
        "--job-name=job",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--cpus-per-task=8",
        "--gres=gpu:a100:4",
        "--mem=6144M",
        "--time=12:00:00",
        "--signal=USR1@120",
        "--partition=gpu",
        "--exclusive",
        "--x",
        "--y=1",
        "--requeue",
        '"--output=/s t/job/output.log"',
    ):
        assert line in found, (line, found)


def test_what_is_not_asked_for_is_left_to_slurm() -> None:
    found = "\n".join(directives(script(submission(), requeue="no")))
    assert not any(word in found for word in ("gres", "mem", "time", "signal", "partition", "exclusive"))
    assert "--no-requeue" in found
    assert "scontrol requeue" not in script(submission(), requeue="no")


@pytest.mark.parametrize("options", [{}, {"requeue": "no"}, {"array": "0-3", "srun": "--mpi=none"}])
def test_shells_accept_the_script(options: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(script(submission(), **options))
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True).stderr == ""
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_a_dry_run_shows_the_script_without_values_and_asks_nobody(state_dir: Path) -> None:
    shown = SlurmEngine({}).render(submission(env={"WANDB_API_KEY": "hush-hush"}))
    assert "export WANDB_API_KEY=" in shown
    assert "hush-hush" not in shown
    assert "TORSH_SECRET_FILE=" in shown
    assert not state_dir.exists()


def test_what_slurm_cannot_do_is_refused() -> None:
    with pytest.raises(FeatureNotAvailable, match="cannot be elastic"):
        SlurmEngine({}).render(submission(elastic=ElasticSpec()))
    for options, message in (({"signal_s": "soon"}, "signal_s must be"), ({"requeue": "maybe"}, "yes or no")):
        with pytest.raises(InvalidArgument, match=message):
            script(submission(time_limit_s=60.0), **options)
    with pytest.raises(InvalidArgument, match="line break"):
        script(submission(), partition="gpu\n#SBATCH --x")
