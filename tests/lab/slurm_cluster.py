"""A real SLURM: munged, slurmctld and one slurmd per node, from a configuration of its own, ended by pid.

Without hosts it is one node on loopback with several slots; with hosts of the lab it has one node on each.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.bed.ports import free_port
from tests.lab.network import Host

NUM_SLOTS = 8
_START_TIMEOUT_S = 40.0
PROGRAMS = ("/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "sbatch", "srun", "scontrol")

_CONFIG = """
ClusterName=torsh
SlurmctldHost={controller}({address})
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
PriorityType=priority/basic
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait={kill_wait_s}
MinJobAge=300
JobRequeue=1
InactiveLimit=0
SlurmctldTimeout=60
SlurmdTimeout=60
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class SlurmCluster:
    """Daemons of one small cluster. `env` has what client programs need."""

    def __init__(self, folder: Path, *, hosts: Sequence[Host] = (), kill_wait_s: int = 20) -> None:
        self._folder = folder
        self._hosts = list(hosts)
        self._kill_wait_s = kill_wait_s
        self._stack = ExitStack()
        self._daemons: list[subprocess.Popen[str]] = []
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        folder = self._folder
        # Sockets of steps are in there, and a directory of pytest's may be too long for one.
        spool = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="slurmd-")))
        folder.chmod(0o755)  # munged refuses a socket in a directory that others cannot reach
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        names = [host.name for host in self._hosts] or [socket.gethostname().partition(".")[0]]
        addresses = [host.address for host in self._hosts] or ["127.0.0.1"]
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={NUM_SLOTS} RealMemory=4000 Gres=gpu:4 State=UNKNOWN"
            for name, address in zip(names, addresses, strict=True)
        )
        ports = (6817, 6818) if self._hosts else (free_port(), free_port())
        (folder / "slurm.conf").write_text(
            _CONFIG.format(
                controller=names[0],
                address=addresses[0],
                port=ports[0],
                node_port=ports[1],
                folder=folder,
                spool=spool,
                nodes=nodes,
                kill_wait_s=self._kill_wait_s,
            )
        )
        # Named, because slurmd would look for the version in /sys/fs/cgroup, which hosts of the lab do not have.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # A GPU is a device file to SLURM; which ones these are, no test asks.
        devices = ("null", "zero", "full", "random")
        (folder / "gres.conf").write_text("".join(f"Name=gpu File=/dev/{device}\n" for device in devices))
        munge = ["/usr/sbin/munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
        munge += [
            f"--log-file={folder}/munged.log",
            f"--pid-file={folder}/munged.pid",
            f"--seed-file={folder}/munge.seed",
        ]
        self._spawn(munge, None, "munged")
        self._await((folder / "munge.socket").exists)
        first = self._hosts[0] if self._hosts else None
        self._spawn(["/usr/sbin/slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf")], first, "slurmctld")
        for number, name in enumerate(names):
            host = self._hosts[number] if self._hosts else None
            (spool / name).mkdir()
            self._spawn(
                ["/usr/sbin/slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf")], host, f"slurmd-{name}"
            )
        self._await(lambda: self.run("sinfo", "-h", "-o", "%T").stdout.split() == ["idle"])

    def _spawn(self, command: list[str], host: Host | None, name: str) -> None:
        log = self._stack.enter_context((self._folder / f"{name}.out").open("w"))
        env = {**os.environ, **self.env}
        if host is not None:
            self._daemons.append(host.popen(command, env=self.env, stdout=log, stderr=log))
        else:
            self._daemons.append(
                subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True, start_new_session=True)
            )

    @property
    def pids(self) -> list[int]:
        """Of the daemons."""
        return [daemon.pid for daemon in self._daemons]

    def run(self, *command: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """A client program, on the controller's host."""
        if self._hosts:
            return self._hosts[0].run(command, env=self.env, timeout_s=timeout_s, check=False)
        env = {**os.environ, **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)

    def _await(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not is_done():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                texts = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in self._folder.glob("*.[lo][ou][gt]")]
                raise RuntimeError(f"SLURM does not start (ended: {ended})\n" + "\n".join(texts))
            time.sleep(0.05)

    def close(self) -> None:
        """End what still runs of jobs, then the daemons, in the order in which they need each other."""
        if len(self._daemons) > 1 and self._daemons[1].poll() is None:
            self.run("scancel", "--state=RUNNING", "--signal=KILL", "--full", "--user=root")
            self.run("scancel", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(timeout=10)
        self._daemons.clear()
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()
