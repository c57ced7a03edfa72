"""Host discovery scripts: what they may print, how they may fail, and what a watch makes of it."""

from __future__ import annotations

import select
from pathlib import Path

import pytest

from torsh_distributed.errors import InvalidArgument, IoError, OperationTimeout, TorshError
from torsh_distributed.launch.control.host_discovery import (
    HostReport,
    HostWatch,
    await_slots,
    discovery_command,
    find_hosts,
    parse_answer,
)
from torsh_distributed.launch.spec import DiscoverySpec


def script(folder: Path, body: str) -> str:
    path = folder / "discover.sh"
    draft = folder / "discover.part"
    draft.write_text(f"#!/bin/sh\n{body}\n")
    draft.chmod(0o755)
    draft.rename(path)
    return str(path)


def test_an_answer_is_hosts_with_or_without_slots() -> None:
    text = "a:4\n\n  user@b.example : \n"
    assert parse_answer("a:4\n\n  b \nuser@c:0\n[fd00::1]:2\n[fd00::2]\n", 3) == {
        "a": 4,
        "b": 3,
        "user@c": 0,
        "[fd00::1]": 2,
        "[fd00::2]": 3,
    }
    assert parse_answer("a:4\na:2\n", 1) == {"a": 2}  # as in Horovod, the last counts
    assert parse_answer("", 1) == {}
    for garbage in (text, "a:x", "two words", "-oProxyCommand=x", "a:-1", "a:²", ":4", "a;b"):
        with pytest.raises(InvalidArgument, match="one host:slots or host in a line") as caught:
            parse_answer(f"good:1\n{garbage}", 1)
        assert caught.value.context["line"] >= 2


def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(IoError, match="does not exist"):
        discovery_command(str(tmp_path / "none.sh"))
    plain = tmp_path / "plain.sh"
    plain.write_text("echo a")
    with pytest.raises(IoError, match="not executable") as caught:
        discovery_command(str(plain))
    assert "chmod +x" in str(caught.value.hint)
    with pytest.raises(InvalidArgument, match="needs the program"):
        discovery_command(" ")
    assert discovery_command(f"{script(tmp_path, 'echo a')} --zone 'x y'")[1:] == ("--zone", "x y")
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/shell\n")
    broken.chmod(0o755)
    with pytest.raises(IoError, match="cannot be run"):
        find_hosts(DiscoverySpec(command=(str(broken),)))


def test_a_script_that_fails_hangs_or_babbles_is_an_error_that_says_so(tmp_path: Path) -> None:
    spec = DiscoverySpec(command=(script(tmp_path, "echo a:2; echo b"),), default_slots=4)
    assert find_hosts(spec) == {"a": 2, "b": 4}
    script(tmp_path, "echo no cloud today >&2; exit 7")
    with pytest.raises(IoError, match="exit code 7") as failed:
        find_hosts(spec)
    assert failed.value.context["said"] == "no cloud today"
    script(tmp_path, "echo hello world")
    with pytest.raises(InvalidArgument, match="one host:slots"):
        find_hosts(spec)
    # Its child keeps the pipe open: both are ended.
    script(tmp_path, "sleep 600 & sleep 600")
    with pytest.raises(OperationTimeout, match=r"did not end within 0\.2 s"):
        find_hosts(DiscoverySpec(command=spec.command, timeout_s=0.2))


def test_a_job_starts_once_there_are_enough_slots(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("0")
    body = f'n=$(($(cat "{count}") + 1)); echo $n > "{count}"; echo localhost:$n'
    spec = DiscoverySpec(command=(script(tmp_path, body),), interval_s=0.01)
    said: list[str] = []
    assert await_slots(spec, 3, timeout_s=60.0, say=said.append) == {"localhost": 3}
    assert said == [f"waiting for 3 slots: the host discovery script offers {number}" for number in (1, 2)]
    script(tmp_path, "echo localhost:1")
    with pytest.raises(OperationTimeout, match="offered 1 slots, and 3 are needed"):
        await_slots(spec, 3, timeout_s=0.1, say=said.append)
    script(tmp_path, "exit 1")
    with pytest.raises(TorshError, match="exit code 1"):
        await_slots(spec, 3, timeout_s=60.0, say=said.append)


def test_a_watch_tells_changes_and_each_trouble_once(tmp_path: Path) -> None:
    spec = DiscoverySpec(command=(script(tmp_path, "echo a:2"),), interval_s=0.01)
    with HostWatch(spec) as watch:

        def next_reports() -> list[HostReport]:
            assert select.select([watch.fd], [], [], 60.0)[0], "no report"
            return watch.take()

        assert next_reports() == [HostReport(hosts={"a": 2})]
        script(tmp_path, "exit 3")
        (trouble,) = next_reports()
        assert "exit code 3" in str(trouble.problem)
        script(tmp_path, "echo a:2")  # the same answer as before the trouble is news
        assert next_reports() == [HostReport(hosts={"a": 2})]
        script(tmp_path, "echo a:1")
        assert next_reports() == [HostReport(hosts={"a": 1})]
        script(tmp_path, "sleep 600")
        assert watch.take() == []
