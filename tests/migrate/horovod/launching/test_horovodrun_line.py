"""horovodrun's options: every one honoured, without effect and said, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, IoError
from torsh_distributed.migrate.command_lines import find_run_as, translate_line
from torsh_distributed.migrate.horovod.launching.horovodrun_line import FLAGS

REFUSED = {
    *("--version", "-cb", "--check-build", "--jsrun", "--mpi-args", "--binding-args", "--thread-affinity"),
}
OURS = {"--nproc-per-node": True, "--verbose": False, "--log-dir": True, "--mpi": False, "--max-restarts": True}


def translate(text: str) -> tuple[list[str], dict[str, str], list[str]]:
    line = translate_line("horovod", text.split(), OURS)
    assert line.env.pop("TORSH_RUN_AS") == "horovod"
    return line.args, line.env, line.notes


@pytest.mark.parametrize(
    ("line", "args", "env"),
    [
        ("-np 4 python train.py --lr 1 -np 2", "--nproc-per-node 4 train.py --lr 1 -np 2", {}),
        ("-np 2 -H localhost:4 train.py", "--nproc-per-node 2 train.py", {}),
        ("-H localhost:3 python3.11 -u -m pkg.train x", "--nproc-per-node 3 --module pkg.train x", {}),
        ("--verbose --log-dir d --nproc-per-node 2 t.py", "--verbose --log-dir d --nproc-per-node 2 t.py", {}),
        ("--num-proc=2 bash job.sh", "--nproc-per-node 2 --no-python bash job.sh", {}),
        ("-np 1 -- python t.py", "--nproc-per-node 1 t.py", {}),
        ("--start-timeout 9 --output-filename o t.py", "--join-timeout 9 --log-dir o t.py", {}),
        ("--fusion-threshold-mb 32 t.py", "t.py", {"HOROVOD_FUSION_THRESHOLD": str(32 * 2**20)}),
        (
            "--timeline-filename f --timeline-mark-cycles t.py",
            "t.py",
            {"HOROVOD_TIMELINE": "f", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
        ),
        (
            "--reset-limit 3 t.py",
            "--max-restarts 3 t.py",
            {"HOROVOD_RESET_LIMIT": "3", "HOROVOD_ELASTIC": "1"},
        ),
        ("--no-stall-check t.py", "t.py", {"HOROVOD_STALL_CHECK_DISABLE": "1"}),
        (
            "--network-interface eth1 t.py",
            "t.py",
            {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"},
        ),
        ("--gloo --log-level INFO t.py", "t.py", {"TORSH_LOG": "INFO"}),
        (
            "-np 2 --min-np 1 --max-np 4 t.py",
            "--elastic --min-workers 1 --max-workers 4 --nproc-per-node 2 t.py",
            {"HOROVOD_ELASTIC": "1"},
        ),
        (
            "-np 2 --min-np 1 --elastic-timeout 9 t.py",
            "--wait-timeout 9 --elastic --min-workers 1 --max-workers 2 --nproc-per-node 2 t.py",
            {"HOROVOD_ELASTIC": "1"},
        ),
        ("-np 2 --elastic-timeout 9 t.py", "--join-timeout 9 --nproc-per-node 2 t.py", {}),
        (
            (
                "-np 2 --min-np 1 --max-np 4 --host-discovery-script ./d.sh --slots 3 --blacklist-cooldown-range 5 60 "
                "--elastic-timeout 9 t.py"
            ),
            (
                "--elastic --min-workers 1 --max-workers 4 --nproc-per-node 2 --wait-timeout 9 "
                "--host-discovery-script ./d.sh --slots-per-host 3 --host-cooldown 5-60 t.py"
            ),
            {"HOROVOD_ELASTIC": "1"},
        ),
        (
            "-np 4 --host-discovery-script=./d.sh t.py",
            (
                "--elastic --min-workers 4 --max-workers 65536 --nproc-per-node 4 --wait-timeout 600 "
                "--host-discovery-script ./d.sh t.py"
            ),
            {"HOROVOD_ELASTIC": "1"},
        ),
        (
            "--min-np 2 t.py",
            "--elastic --min-workers 2 --max-workers 2 --nproc-per-node 2 t.py",
            {"HOROVOD_ELASTIC": "1"},
        ),
    ],
)
def test_what_has_a_counterpart_is_translated(line: str, args: str, env: dict[str, str]) -> None:
    assert translate(line) == (args.split(), env, [])


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_every_option_is_honoured_noted_or_refused_by_name(flag: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    config = tmp_path / "config.yaml"
    config.write_text("timeline:\n  filename: x\n")
    value = {"-H": "localhost:2", "--hosts": "localhost:2", "-hostfile": str(hostfile), "--hostfile": str(hostfile)}
    values = [value.get(flag, str(config) if flag == "--config-file" else "2")] * FLAGS[flag].num_values
    words = [flag, *values, "t.py"]
    if flag in REFUSED:
        with pytest.raises(FeatureNotAvailable, match=re.escape(flag)) as caught:
            translate_line("horovod", words, OURS)
        assert caught.value.hint
        return
    line = translate_line("horovod", words, OURS)
    assert line.args[-1] == "t.py"
    assert all(note.startswith(f"{flag} ") for note in line.notes)
    does_nothing = flag in ("--gloo", "--no-autotune", "--slots", "--slots-per-host")
    assert line.notes or line.args != ["t.py"] or len(line.env) > 1 or does_nothing


def test_hosts_that_a_script_names_are_named_nowhere_else(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="say the same thing twice"):
        translate("-np 2 -H localhost:2 --host-discovery-script ./d.sh t.py")
    with pytest.raises(InvalidArgument, match="not between --min-np 3"):
        translate("-np 2 --min-np 3 --host-discovery-script ./d.sh t.py")
    config = tmp_path / "config.yaml"
    config.write_text("host-discovery-script: ./d.sh\nblacklist-cooldown-range: [5, 60]\nmin-np: 2\n")
    assert translate(f"--config-file {config} t.py")[0][-5:] == [
        "--host-discovery-script",
        "./d.sh",
        "--host-cooldown",
        "5-60",
        "t.py",
    ]
    config.write_text("blacklist-cooldown-range: 5\n")
    with pytest.raises(InvalidArgument, match="takes 2 value"):
        translate(f"--config-file {config} t.py")
    assert "has no effect" in translate("-np 2 --blacklist-cooldown-range 5 60 t.py")[2][0]


def test_several_hosts_are_entered_over_ssh_unless_the_user_starts_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node2")
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: [])
    expected = ["--ssh", "--hosts", "node1:4,node2:4", "t.py"]
    assert translate("-np 8 -H node1:4,node2:4 t.py")[0] == expected
    args, _, notes = translate("-np 4 -H node1:4,node2:4 -p 12345 -i key t.py")
    assert args == [
        "--ssh",
        "--hosts",
        "node1:4",
        "--ssh-option",
        "Port=12345",
        "--ssh-option",
        "IdentityFile=key",
        "t.py",
    ]
    assert notes == []
    by_hand = ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node1", "t.py"]
    ours = {**OURS, "--token-file": True}
    line = ["--token-file", "f", "-np", "8", "-H", "node1:4,node2:4", "t.py"]
    assert translate_line("horovod", line, ours).args == ["--token-file", "f", *by_hand]
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two\nnode1 slots=4\n\nnode2 slots=4\n")
    assert translate(f"-np 8 --hostfile {hostfile} t.py")[0] == expected
    assert translate("-np 4 -H node2:4,node1:4 t.py")[0] == ["--nproc-per-node", "4", "t.py"]
    with pytest.raises(FeatureNotAvailable, match="no host of the list is this machine"):
        translate_line("horovod", ["--token-file", "f", "-H", "node1:4,node3:4", "t.py"], ours)
    with pytest.raises(InvalidArgument, match="localhost means another machine"):
        translate("-H localhost:4,node3:4 t.py")
    with pytest.raises(FeatureNotAvailable, match="same number of workers"):
        translate("-np 6 -H node1:4,node2:4 t.py")
    with pytest.raises(InvalidArgument, match="above the 8 slots"):
        translate("-np 9 -H node1:4,node2:4 t.py")
    with pytest.raises(InvalidArgument, match="node1:4,node2:4"):
        translate("-H node1:x t.py")
    (tmp_path / "bad").write_text("node1 cores=4\n")
    with pytest.raises(InvalidArgument, match="HOST slots=N"):
        translate(f"--hostfile {tmp_path / 'bad'} t.py")
    with pytest.raises(IoError, match="hostfile"):
        translate(f"--hostfile {tmp_path / 'none'} t.py")


def test_the_config_file_is_read_key_by_key(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "params:\n  fusion_threshold_mb: 8\n  cycle_time_ms: 2\n"
        "stall_check:\n  enabled: false\n  warning_time_seconds: 5\n"
        "timeline:\n  filename: t.json\n  mark_cycles: true\n"
    )
    args, env, notes = translate(f"--config-file {config} -np 2 t.py")
    assert args == ["--nproc-per-node", "2", "t.py"]
    assert env["HOROVOD_FUSION_THRESHOLD"] == str(8 * 2**20)
    assert env["HOROVOD_STALL_CHECK_DISABLE"] == "1"
    assert env["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "5"
    assert env["HOROVOD_TIMELINE_MARK_CYCLES"] == "1"
    assert env["HOROVOD_CYCLE_TIME"] == "2"
    assert notes == []
    config.write_text("params:\n  fusion: 8\n")
    with pytest.raises(InvalidArgument, match=r"params.fusion is not a key"):
        translate(f"--config-file {config} t.py")


def test_the_library_is_found_before_its_options_and_not_in_those_of_the_script() -> None:
    ours = {**OURS, "--as": True}
    assert find_run_as(["--verbose", "--as", "horovod", "-np", "2", "t.py"], ours) == (
        "horovod",
        ["--verbose", "-np", "2", "t.py"],
    )
    assert find_run_as(["--as=horovod", "t.py"], ours) == ("horovod", ["t.py"])
    assert find_run_as(["t.py", "--as", "x"], ours) is None
    assert find_run_as(["--nproc-per-node", "2", "t.py", "--as", "x"], ours) is None
    with pytest.raises(InvalidArgument, match="needs the name"):
        find_run_as(["--as"], ours)
    with pytest.raises(InvalidArgument, match="does not know"):
        translate_line("horovd", ["t.py"], ours)
    with pytest.raises(InvalidArgument, match="twice"):
        translate("-np 2 --nproc-per-node 2 t.py")
    with pytest.raises(InvalidArgument, match="whole number"):
        translate("-np two t.py")
