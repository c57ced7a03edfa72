"""The options of the command `deepspeed`: every one honoured, without effect and said, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.migrate.command_lines import translate_line
from torsh_distributed.migrate.deepspeed.deepspeed_line import LOCAL_RANK_VARIABLE, OPTIONS

OURS = {"--nproc-per-node": True, "--verbose": False, "--log-dir": True, "--master-port": True}
PASSES = {LOCAL_RANK_VARIABLE: "1"}
REFUSED = {
    *("--bind_core_list", "--elastic_training", "--launcher", "--launcher_args", "--venv_script", "--autotuning"),
}


@pytest.fixture(autouse=True)
def _no_environment_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def translate(text: str) -> tuple[list[str], dict[str, str], list[str]]:
    line = translate_line("deepspeed", text.split(), OURS)
    assert line.env.pop("TORSH_RUN_AS") == "deepspeed"
    return line.args, line.env, line.notes


@pytest.mark.parametrize(
    ("line", "args", "env"),
    [
        ("--num_gpus 4 train.py --num_gpus 2", "--nproc-per-node 4 train.py --num_gpus 2", PASSES),
        ("--num_gpus=2 --master_port 2950 t.py", "--master-port 2950 --nproc-per-node 2 t.py", PASSES),
        ("--num_gpus=-1 t.py", "t.py", PASSES),
        ("t.py --deepspeed_config ds.json", "t.py --deepspeed_config ds.json", {}),
        ("--nproc-per-node 2 --verbose t.py", "--nproc-per-node 2 --verbose t.py", {}),
        ("--num_gpus 2 --no_local_rank t.py", "--nproc-per-node 2 t.py", {LOCAL_RANK_VARIABLE: "0"}),
        ("--num_gpus 2 --module pkg.train x", "--nproc-per-node 2 --module pkg.train x", PASSES),
        ("--no_python --num_gpus 1 bash job.sh", "--nproc-per-node 1 --no-python bash job.sh", PASSES),
        ("--enable_each_rank_log d --num_gpus 1 t.py", "--log-dir d --nproc-per-node 1 t.py", PASSES),
        ("--include localhost:0,2 t.py", "--nproc-per-node 2 t.py", {**PASSES, "CUDA_VISIBLE_DEVICES": "0,2"}),
        ("--strict --nproc-per-node 2 t.py", "--nproc-per-node 2 t.py", {"TORSH_STRICT_CONFIG": "1"}),
        ("-i localhost:0,1 t.py", "--nproc-per-node 2 t.py", PASSES),
    ],
)
def test_what_has_a_counterpart_is_translated(line: str, args: str, env: dict[str, str]) -> None:
    assert translate(line) == (args.split(), env, [])


def test_a_hostfile_gives_the_slots(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# all\nlocalhost slots=4\n")
    assert translate(f"-H {hosts} t.py")[0] == ["--nproc-per-node", "4", "t.py"]
    assert translate(f"--hostfile={hosts} --num_gpus 3 t.py")[0] == ["--nproc-per-node", "3", "t.py"]
    args, env, _ = translate(f"--hostfile {hosts} -e localhost:0,3 t.py")
    assert args == ["--nproc-per-node", "2", "t.py"]
    assert env["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_several_hosts_are_entered_over_ssh_unless_the_user_starts_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node2")
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: [])
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=4\nnode2 slots=4\n")
    over_ssh = ["--ssh", "--hosts", "node1:4,node2:4"]
    args, _, notes = translate(f"-H {hosts} --ssh_port 2222 --launcher pdsh t.py")
    assert args == [*over_ssh, "--ssh-option", "Port=2222", "t.py"]
    assert notes == ["--launcher pdsh has no effect: hosts are entered with ssh itself"]
    assert translate(f"-H {hosts} -i node1:0,1@node2:0,1 t.py")[0] == ["--ssh", "--hosts", "node1:2,node2:2", "t.py"]
    by_hand = ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node1", "t.py"]
    assert translate(f"-H {hosts} --no_ssh t.py")[0] == by_hand
    assert translate(f"-H {hosts} --ssh_port 1 -e node1 t.py")[2] == [
        "--ssh_port has no effect: no host is entered over SSH"
    ]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("node1 slots=2\nnode1 slots=2\n", "names node1 twice"),
        ("node1 gpus=2\n", "HOST slots=N"),
        ("\n# nothing\n", "names no host"),
    ],
)
def test_a_bad_hostfile_is_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(InvalidArgument, match=match):
        translate(f"-H {tmp_path / 'hosts'} t.py")


def test_contradictions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="exclude each other"):
        translate("-i a -e b t.py")
    with pytest.raises(InvalidArgument, match="exclude --include"):
        translate("-i localhost:0 --num_gpus 1 t.py")
    with pytest.raises(InvalidArgument, match="needs a hostfile"):
        translate("--num_nodes 2 t.py")
    with pytest.raises(InvalidArgument, match="whole number"):
        translate("--num_gpus two t.py")
    with pytest.raises(IoError, match="cannot be read"):
        translate("-H nowhere t.py")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    with pytest.raises(InvalidArgument, match="No slot '5'"):
        translate(f"-H {tmp_path / 'hosts'} -i localhost:5 t.py")


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_is_honoured_noted_or_refused(name: str) -> None:
    value = " 1" if OPTIONS[name].has_value else ""
    if name in REFUSED:
        with pytest.raises(FeatureNotAvailable, match=name):
            translate(f"{name}{value} t.py")
    elif name not in ("-H", "--hostfile", "-i", "--include", "-e", "--exclude"):
        assert translate(f"{name}{value} t.py")[0][-1] == "t.py"


@pytest.mark.parametrize("mode", ["tune", "run"])
def test_autotuning_is_answered_by_our_commands(mode: str) -> None:
    with pytest.raises(FeatureNotAvailable) as caught:
        translate(f"--autotuning {mode} --num_gpus 2 t.py --deepspeed_config ds.json")
    assert caught.value.hint is not None
    for command in ("torsh run --trace", "torsh why", "torsh tune"):
        assert command in caught.value.hint


def test_variables_of_the_environment_file_reach_the_workers(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# mine\nNCCL_DEBUG=INFO\n")
    assert translate("t.py")[1] == {"NCCL_DEBUG": "INFO"}
