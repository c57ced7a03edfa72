"""A job under attack: started with `torsh run`, observed while strangers try, ended on request, and judged.

The workers reduce tensors without a pause, check every sum and note the longest pause. After the attack a member looks
for keys that no member wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attacks import attacker
from tests.lab.network import Host
from torsh_distributed.comm.trust.handshake import Handshake

NOBODY = pwd.getpwnam("nobody")
_READY_S = 60.0
_SCRIPT = """
import json, os, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torsh_distributed as td
from torsh_distributed.comm.meeting.rendezvous import open_job_store

folder = Path(sys.argv[1])
td.init()
rank, size = td.rank(), td.world_size()
store = open_job_store(os.environ["TORSH_STORE"], timedelta(seconds=30))
(folder / f"ready-{rank}").touch()
longest_s, num_steps, last_s, wrong = 0.0, 0, time.monotonic(), 0
while True:
    value = torch.tensor([1.0, float(rank == 0 and (folder / "stop").exists())])
    td.all_reduce(value)
    now_s = time.monotonic()
    if num_steps > 20:
        longest_s = max(longest_s, now_s - last_s)
    if num_steps == 2000 and rank == 0:
        (folder / "quiet").write_text(str(longest_s))
    last_s, num_steps = now_s, num_steps + 1
    wrong += value[0].item() != size
    if value[1].item():
        break
    if num_steps % 50 == 0:
        store.set(f"step-{rank}", str(num_steps))
        assert store.get(f"step-{rank}") == str(num_steps).encode()
report = {"longest_s": longest_s, "num_steps": num_steps, "wrong": wrong, "strangers": store.check(["stranger"])}
(folder / f"report-{rank}").write_text(json.dumps(report))
td.destroy_process_group()
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What strangers achieved against one job."""

    attempts: list[dict[str, Any]]
    exit_codes: list[int]
    reports: list[dict[str, Any]]
    num_ranks: int
    output: str

    @property
    def reads(self) -> list[str]:
        """Attempts that got something they should not."""
        return [f"{found['name']}: {found['got']}" for found in self.attempts if found["got"]]

    @property
    def num_writes(self) -> int:
        """Keys of strangers in the store, and sums that were wrong."""
        return sum(report["strangers"] + report["wrong"] for report in self.reports)

    @property
    def num_joins(self) -> int:
        """Ranks that the job did not have before."""
        return max(0, len(self.reports) - self.num_ranks)

    @property
    def num_kills(self) -> int:
        """Launchers and ranks that did not end well."""
        return sum(code != 0 for code in self.exit_codes) + self.num_ranks - len(self.reports)

    @property
    def longest_pause_s(self) -> float:
        """The longest step of any rank during the attack."""
        return max((report["longest_s"] for report in self.reports), default=float("inf"))

    @property
    def num_warnings(self) -> int:
        """Lines that the launchers printed about connections."""
        return sum("refused" in line or "cut off" in line for line in self.output.splitlines())


@dataclass(kw_only=True)
class Victim:
    """A running job; `hosts` are where its launchers run, none for one node on this machine."""

    folder: Path
    hosts: Sequence[Host] = ()
    nproc_per_node: int = 2
    master_port: int = 29611
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)

    @property
    def num_nodes(self) -> int:
        return max(1, len(self.hosts))

    def start_node(self, node_rank: int, *options: str) -> None:
        """Start one launcher."""
        script = self.folder / "victim.py"
        script.write_text(_SCRIPT)
        command = [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", str(self.nproc_per_node)]
        command += ["--start-method", "spawn"]  # strangers find workers by their command lines
        if self.hosts:
            command += ["--nnodes", str(self.num_nodes), "--node-rank", str(node_rank)]
            command += ["--master-addr", self.hosts[0].address, "--master-port", str(self.master_port)]
            command += ["--token-file", str(self.folder / "token")]
        command += [*options, str(script), str(self.folder)]
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0"} if self.hosts else dict(os.environ)
        if self.hosts:
            self.launchers.append(self.hosts[node_rank].popen(command, env=env, **settings))
        else:
            self.launchers.append(subprocess.Popen(command, env=env, **settings))

    def wait_ready(self) -> None:
        """Return once every rank is in its loop."""
        deadline = time.monotonic() + _READY_S
        wanted = [self.folder / f"ready-{rank}" for rank in range(self.num_nodes * self.nproc_per_node)]
        while not all(path.exists() for path in wanted):
            ended = [launcher for launcher in self.launchers if launcher.poll() is not None]
            assert not ended, ended[0].communicate()[0]
            assert time.monotonic() < deadline, "the job does not start"
            time.sleep(0.02)

    def pause_s(self) -> float:
        """The longest step of rank 0 before anything happens to the job."""
        deadline = time.monotonic() + _READY_S
        while not (self.folder / "quiet").exists():
            assert time.monotonic() < deadline, "the job does not run"
            time.sleep(0.02)
        return float((self.folder / "quiet").read_text() or 0)

    def processes(self) -> list[tuple[str, int]]:
        """The job's processes: launchers, guardians, stores, workers."""
        roots = {launcher.pid for launcher in self.launchers}
        parents = {}
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
        found = []
        for pid in parents:
            above = pid
            while above in parents and above not in roots:
                above = parents[above]
            if above in roots:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                # Workers begin in our own start-up, which is followed by the user's script.
                names = (part for part in command[1:] if not part.startswith(b"-"))
                name = next((part for part in names if not part.endswith(b"worker_start.py")), b"launcher")
                found.append((Path(name.decode()).name, pid))
        return found

    def facts(self, kinds: Sequence[str], scratch: Path) -> dict[str, Any]:
        """Everything about the job that is no secret, as a stranger could collect it."""
        processes = self.processes()
        worker = next(pid for name, pid in processes if name == "victim.py")
        env = dict(
            entry.split("=", 1) for entry in Path(f"/proc/{worker}/environ").read_text().split("\0") if "=" in entry
        )
        secret = Path(env["TORSH_SECRET_FILE"]).read_text()
        self.tokens.append(secret)
        address = self.hosts[0].address if self.hosts else "127.0.0.1"
        store = [address, int(env["MASTER_PORT"])]
        launcher = [address, self.master_port] if self.hosts else None
        known = {(store[0], store[1]), (address, self.master_port)}
        ports = {end for _, pid in processes for end in listening(pid)}
        return {
            "uid": NOBODY.pw_uid,
            "gid": NOBODY.pw_gid,
            "kinds": list(kinds),
            "store": store,
            "launcher": launcher,
            "other_ports": sorted([host, port] for host, port in ports - known if not host.startswith("127.")),
            "closed_ports": sorted([address, port] for host, port in ports if host.startswith("127."))
            if self.hosts
            else [],
            "pids": processes,
            "directory": str(Path(env["TORSH_SECRET_FILE"]).parent),
            "scratch": str(scratch),
            "guesses": ["none", "torsh", "secret", "token", "root", env["TORCHELASTIC_RUN_ID"], env["TORSH_JOB_MARKS"]],
            "secret_sha256": hashlib.sha256(secret.encode()).hexdigest(),
            "recorded": {magic.decode(): record(secret, magic) for magic in (attacker.STORE, attacker.LAUNCHER)},
        }

    def attack(self, kinds: Sequence[str], host: Host | None = None) -> list[dict[str, Any]]:
        """Let a stranger make every attempt of those kinds, from this machine or another; what each one got."""
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch).chmod(0o777)
            facts = json.dumps(self.facts(kinds, Path(scratch)))
            command = [os.path.realpath(sys.executable), "-I", "-S", "-c", Path(attacker.__file__).read_text()]
            settings: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = host.popen(command, **settings) if host else subprocess.Popen(command, **settings)
            output, _ = process.communicate(facts, timeout=120)
        assert process.returncode == 0, output
        return [json.loads(line) for line in output.splitlines()]

    def finish(self, attempts: list[dict[str, Any]]) -> Verdict:
        """Let the workers end, and judge."""
        (self.folder / "stop").touch()
        output = ""
        for launcher in self.launchers:
            try:
                output += launcher.communicate(timeout=60)[0]
            except subprocess.TimeoutExpired:
                launcher.terminate()
                output += launcher.communicate(timeout=60)[0]
        return Verdict(
            attempts=attempts,
            exit_codes=[launcher.returncode for launcher in self.launchers],
            reports=[json.loads(path.read_text()) for path in sorted(self.folder.glob("report-*"))],
            num_ranks=self.num_nodes * self.nproc_per_node,
            output=output,
        )


@contextmanager
def victim(folder: Path, *, hosts: Sequence[Host] = (), nproc_per_node: int = 2) -> Iterator[Victim]:
    """A job that has not started; whatever it left running is ended."""
    job = Victim(folder=folder, hosts=hosts, nproc_per_node=nproc_per_node)
    try:
        yield job
    finally:
        for launcher in job.launchers:
            if launcher.poll() is None:
                launcher.kill()
                launcher.communicate(timeout=30)


def record(secret: str, magic: bytes) -> str:
    """What a member said on a connection of its own, as someone who listened would have it: hello and proof."""
    client = Handshake(secret.encode(), magic, is_server=False, wants_signing=False)
    server = Handshake(secret.encode(), magic, is_server=True, wants_signing=False)
    return (client.opening + client.feed(server.feed(client.opening))).hex()


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """The addresses on which a process listens, in its own network namespace."""
    inodes = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        table = Path(f"/proc/{pid}/net/tcp").read_text()
    except OSError:
        return
    for line in table.splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            address, _, port = words[1].partition(":")
            octets = bytes.fromhex(address)[::-1]
            yield ".".join(map(str, octets)), int(port, 16)
