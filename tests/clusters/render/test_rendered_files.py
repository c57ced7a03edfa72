"""What `torsh render` writes: shell that shellcheck takes, YAML and JSON that parse, and the job that was asked for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters.kubernetes.submissions import job
from torsh_distributed.clusters.render.rendered_files import RenderedFile, render, write_files
from torsh_distributed.errors import InvalidArgument

AWS = {"subnet": "subnet-1", "instance_profile": "trainer"}
GCP = {"project": "lab", "service_account": "t@lab.example"}
AZURE = {"vault": "keys", "identity": "/subscriptions/1/identity"}


def files(folder: Path, what: str, **changes: Any) -> dict[str, str]:
    options = changes.pop("options", {})
    submission = job(folder, **changes)
    submission.options.clear()
    submission.options.update(options)
    return {one.name: one.text for one in render(what, submission)}


def shellcheck(name: str, text: str) -> None:
    # Without SC2016: the script's own arguments are literal, dollars too.
    done = subprocess.run(
        ["shellcheck", "--shell=bash", "--exclude=SC2016", "-"], input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{name}\n{done.stdout}\n{text}"


@pytest.mark.needs_command("shellcheck")
@pytest.mark.parametrize("is_rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize("what", ["pbs", "slurm", "mpi", "aws", "gcp", "azure"])
def test_shell_is_clean(tmp_path: Path, what: str, is_rich: bool) -> None:
    image = {} if what in ("pbs", "slurm", "mpi") else {"image": "registry.example/train:1"}
    options = {**image, **{"aws": AWS, "gcp": GCP, "azure": AZURE}.get(what, {})}
    if what == "mpi":
        options["hostfile"] = "my hosts"
    changes: dict[str, Any] = {"name": "train1"}
    if is_rich:
        options |= {} if not image else {"spot": "yes"}
        rich = {"aws": {"efa_cards": "4", "key_name": "mine"}, "pbs": {"queue": "gpu", "activate": "module load x"}}
        rich["mpi"] = {"mpi": "mpich"}
        options |= rich.get(what, {})
        changes |= {"gpus_per_worker": 4, "env": {"A": "it's $5"}, "memory_per_worker": "8G", "time_limit_s": 43200.0}
    for name, text in files(tmp_path, what, options=options, **changes).items():
        shellcheck(name, text)


def test_a_pbs_script_asks_for_what_the_job_needs(tmp_path: Path) -> None:
    text = files(
        tmp_path,
        "pbs",
        nodes=4,
        workers_per_node=4,
        gpus_per_worker=1,
        memory_per_worker="8G",
        time_limit_s=12 * 3600.0,
        options={"queue": "gpu"},
    )["job.pbs"]
    asked = re.findall(r"^#PBS (.*)$", text, re.MULTILINE)
    assert "-l select=4:ncpus=4:mpiprocs=1:ngpus=4:mem=32gb" in asked
    assert "-l walltime=12:00:00" in asked
    assert "-q gpu" in asked
    assert '--node-rank "$node_rank"' in text
    assert "'$(HOME)'" in text, "arguments of the script are not the shell's"


@pytest.mark.needs_command("bash")
def test_the_parts_of_a_pbs_script_work_together(tmp_path: Path) -> None:
    """Run by bash with a pbsdsh that starts the copies here, and a `torsh` that shows its arguments. No PBS is here."""
    (tmp_path / "job.pbs").write_text(files(tmp_path, "pbs", options={})["job.pbs"])
    (tmp_path / "nodes").write_text("node7\nnode8\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "pbsdsh").write_text('#!/bin/bash\nshift\nfor i in 0 1; do PBS_VNODENUM=$i "$1" "${@:3}"; done\n')
    show = '[[ $1 == --token-file ]] && stat -c %a "$2"; printf "%s " "$1"; shift'
    (tools / "torsh").write_text(f"#!/bin/bash\nwhile [[ $# -gt 0 ]]; do {show}; done\necho\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "job.pbs")],
        env={
            "PATH": f"{tools}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PBS_O_WORKDIR": str(tmp_path),
            "PBS_NODEFILE": str(tmp_path / "nodes"),
            "PBS_JOBID": "30123.server",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2 --node-rank 0 --master-addr node7 --master-port 20123" in done.stdout
    assert "--node-rank 1 --master-addr node7" in done.stdout
    assert done.stdout.count("600\n") == 2, "the secret is this user's alone"
    assert not list(tmp_path.glob(".torsh-*")), "and gone afterwards"


@pytest.mark.needs_command("bash")
def test_an_mpi_script_gives_ranks_the_secret_and_their_place(tmp_path: Path) -> None:
    """Run by bash with an mpirun that shows its arguments. Real MPI is in the tests of the engine."""
    (tmp_path / "hosts").write_text("\nnode7 slots=4\nnode8:4\n")
    text = files(tmp_path, "mpi", nodes=2, workers_per_node=4, env={"A": "b"}, options={"hostfile": "hosts"})[
        "run-mpi.sh"
    ]
    tools = tmp_path / "bin"
    tools.mkdir()
    show = 'stat -c %a "$TORSH_SECRET_FILE"; wc -c < "$TORSH_SECRET_FILE"; echo "$MASTER_ADDR:$MASTER_PORT" "$@"'
    (tools / "mpirun").write_text(f"#!/bin/bash\n{show}\n")
    (tools / "mpirun").chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("600\n65\nnode7:29500 -np 8 --hostfile hosts --bind-to core --map-by ppr:4:node")
    assert "-x TORSH_SECRET_FILE" in done.stdout
    assert done.stdout.endswith("train.py --lr 0.1 $(HOME)\n")
    assert not list(tmp_path.glob(".torsh-*")), "the secret is gone"


def test_a_compose_file_has_a_master_and_workers(tmp_path: Path) -> None:
    made = files(tmp_path, "compose", nodes=3, gpus_per_worker=1, memory_per_worker="2G", env={"A": "$x"}, options={})
    whole = yaml.safe_load(made["compose.yaml"])
    services = whole["services"]
    assert list(services) == ["master", "worker-1", "worker-2"]
    for rank, service in enumerate(services.values()):
        command = service["command"]
        assert command[command.index("--node-rank") + 1] == str(rank)
        assert command[command.index("--master-addr") + 1] == "master"
        assert service["secrets"] == ["job.token"]
        assert service["mem_limit"] == "4gb"
        assert service["environment"] == {"A": "$$x"}
        assert command[-1] == "$$(HOME)", "compose reads a dollar as a variable"
    assert whole["secrets"] == {"job.token": {"file": "./job.token"}}
    assert "*.token" in made[".dockerignore"], "the secret stays out of the image"


def test_a_dockerfile_runs_the_launcher_as_process_1(tmp_path: Path) -> None:
    text = files(tmp_path, "docker", nodes=1, options={"packages": "pandas, rich"})["Dockerfile"]
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in text.splitlines() if line and line[0] != "#"}
    assert json.loads(lines["ENTRYPOINT"]) == ["torsh", "run"]
    assert json.loads(lines["CMD"])[-4:] == ["/workspace/train.py", "--lr", "0.1", "$(HOME)"]
    assert lines["USER"] == "1000"
    assert '"pandas" "rich"' in text
    (probe,) = re.findall(r"HEALTHCHECK .*CMD (\[.*\])", text)
    compile(json.loads(probe)[2], "probe", "exec")


def test_clouds_save_before_their_machines_are_taken_back(tmp_path: Path) -> None:
    for what, own in (("aws", AWS), ("gcp", GCP), ("azure", AZURE)):
        options = {"image": "i", "spot": "yes", **own}
        made = files(tmp_path, what, name="train1", gpus_per_worker=1, options=options)
        assert f"--spot-notice {what}" in made["node.sh"]
        assert "spot" in made[f"launch-{what}.sh"].lower()
        assert "has not been run against the cloud" in made[f"launch-{what}.sh"]
        plain = files(tmp_path, what, name="train1", options={**options, "spot": "no"})
        assert "--spot-notice" not in plain["node.sh"]
    efa = files(tmp_path, "aws", options={"image": "i", "efa_cards": "2", **AWS})
    assert efa["launch-aws.sh"].count("InterfaceType=efa") == 2
    assert "uverbs1" in efa["node.sh"]


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("aws", {"image": "i", **AWS, "subnet": ""}, "needs --set subnet"),
        ("aws", AWS, "needs --set image"),
        ("aws", {"image": "i", "spto": "yes", **AWS}, "did you mean 'spot'"),
        ("gcp", {"image": "i", "spot": "maybe", **GCP}, "yes or no"),
        ("azure", {"image": "i", **AZURE}, "at most 9"),
        ("aws", {"image": "i", "efa_cards": "many", **AWS}, "a number"),
        ("pbs", {"partition": "gpu"}, "no setting 'partition'"),
        ("compost", {}, "did you mean 'compose'"),
        ("docker", {"user": "me"}, "a number"),
        ("mpi", {}, "hostfile"),
        ("mpi", {"hostfile": "h", "mpi": "lam"}, "openmpi or mpich"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, what: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        files(tmp_path, what, options=options, name="train-1-long")


def test_paths_of_this_machine_do_not_get_into_images(tmp_path: Path) -> None:
    from torsh_distributed.launch.spec import Entry

    outside = Entry(target="/opt/train.py")
    with pytest.raises(InvalidArgument, match="not in the folder"):
        files(tmp_path, "docker", entry=outside)
    with pytest.raises(InvalidArgument, match="path of this machine"):
        files(tmp_path, "aws", entry=outside, options={"image": "i", **AWS})


def test_files_are_replaced_only_if_told_to(tmp_path: Path) -> None:
    made = [RenderedFile("a.sh", "one\n", is_program=True), RenderedFile("b.txt", "two\n")]
    folder = tmp_path / "new"
    assert write_files(made, folder, replaces=False) == [folder / "a.sh", folder / "b.txt"]
    assert (folder / "a.sh").stat().st_mode & 0o111
    with pytest.raises(InvalidArgument, match="--force"):
        write_files([RenderedFile("c.txt", "x"), *made], folder, replaces=False)
    assert not (folder / "c.txt").exists(), "all or nothing"
    write_files(made, folder, replaces=True)
