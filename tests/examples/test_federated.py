"""The federated example learns its digits, by the command that its first lines name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torsh_distributed.cli.federated.commands import app
from torsh_distributed.federated.deployment.identity.known_peers import read_peers

EXAMPLE = Path(__file__).parents[2] / "examples" / "federated" / "digits.py"
pytestmark = [pytest.mark.ranks, pytest.mark.needs_library("sklearn")]


def torsh_federated(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.cli.entry_point", "federated", *args],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_simulation_learns_the_digits(tmp_path: Path) -> None:
    command = ["simulate", str(EXAMPLE), "--clients", "100", "--output", str(tmp_path / "run")]
    lines = torsh_federated(*command).splitlines()
    last = next(line for line in lines if line.startswith("round 14:"))
    assert "10 of 10 clients" in last
    assert float(last.split("accuracy ")[1].split()[0]) > 0.85
    assert (tmp_path / "run" / "model.pt").exists()


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "federated", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_until(process: subprocess.Popen[str], beginning: str) -> list[str]:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line.strip())
        if line.startswith(beginning):
            return seen
    raise AssertionError("\n".join(seen))


@pytest.mark.matrix
@pytest.mark.needs_library("cryptography")
def test_devices_learn_the_digits_though_server_and_a_device_are_killed(tmp_path: Path) -> None:
    """SIGKILL of either loses no round and doubles none: the second server goes on behind the first one's last."""
    options = [str(EXAMPLE), "--directory", str(tmp_path / "server"), "--rounds", "8", "--per-round", "3"]
    server = start("serve", *options, "--min-clients", "2", "--tokens", "3")
    processes = [server]
    try:
        head = lines_until(server, "token")
        head += [lines_until(server, "token")[-1] for _ in range(2)]
        address = head[0].removeprefix("serving ")
        tokens = [line.removeprefix("token ") for line in head[1:]]

        def join(index: int, *token: str) -> subprocess.Popen[str]:
            name = f"device-{index}"
            return start("join", address, str(EXAMPLE), "--name", name, "--directory", str(tmp_path / name), *token)

        devices = [join(index, "--token", token) for index, token in enumerate(tokens)]
        processes += devices
        first = lines_until(server, "round 2:")
        server.kill()
        devices[0].kill()
        first += server.communicate(timeout=30)[0].splitlines()
        again = start("serve", *options, "--min-clients", "2", "--port", address.rpartition(":")[2])
        devices[0] = join(0)
        processes += [again, devices[0]]
        second, _ = again.communicate(timeout=100)
        assert again.returncode == 0, second
        ends = [device.communicate(timeout=30)[0] for device in devices]
        assert all("the run is over" in end for end in ends), ends
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    printed = [line for line in [*first, *second.splitlines()] if line.startswith("round ")]
    numbers = [int(line.split()[1].rstrip(":")) for line in printed]
    # A round whose state was written may have been killed before it was printed; none is printed twice.
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 7
    assert len(numbers) >= 7
    assert float(printed[-1].split("accuracy ")[1].split()[0]) > 0.5


@pytest.mark.matrix
@pytest.mark.timeout(300)
@pytest.mark.needs_library("cryptography")
def test_devices_learn_the_digits_by_sums_alone_though_one_is_killed(tmp_path: Path) -> None:
    """Secure aggregation by the command line, with a list of the devices; four take part, and one dies in mid-run."""
    names = [f"device-{index}" for index in range(4)]
    peers = tmp_path / "peers.txt"
    with peers.open("w") as file:
        for name in names:
            place = ["--name", name, "--directory", str(tmp_path / name)]
            file.write(CliRunner().invoke(app, ["key", *place], catch_exceptions=False).output)
    assert len(read_peers(peers)) == 4
    options = [str(EXAMPLE), "--directory", str(tmp_path / "server"), "--rounds", "5", "--per-round", "4"]
    server = start("serve", *options, "--tokens", "4", "--secure-aggregation", "--min-clients", "3")
    processes = [server]
    try:
        head = lines_until(server, "token")
        head += [lines_until(server, "token")[-1] for _ in range(3)]
        address = head[0].removeprefix("serving ")
        for name, token in zip(names, [line.removeprefix("token ") for line in head[1:]], strict=True):
            place = ["--name", name, "--directory", str(tmp_path / name), "--token", token]
            processes.append(
                start("join", address, str(EXAMPLE), *place, "--secure-aggregation", "--peers", str(peers))
            )
        printed = lines_until(server, "round 1:")
        processes[1].kill()
        printed += server.communicate(timeout=100)[0].splitlines()
        assert server.returncode == 0, printed
        ends = [device.communicate(timeout=30)[0] for device in processes[2:]]
        assert all("the run is over" in end for end in ends), ends
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    rounds = [line for line in printed if line.startswith("round ")]
    assert len(rounds) == 5, printed
    assert "3 of " in rounds[-1]
    assert "client_loss" not in rounds[-1]
    assert float(rounds[-1].split("accuracy ")[1].split()[0]) > 0.4
