"""Whether processes of an engine can form one world: same versions, one process for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from torsh_distributed.clusters.hosted.rank_host import HostFacts
from torsh_distributed.comm.meeting.software_versions import comparable
from torsh_distributed.errors import ConfigurationError

_COMPARED = {"python": "Python", "torch": "torch", "torsh": "torsh-distributed"}


def require_fitting(hosts: Sequence[HostFacts], driver: HostFacts, *, engine: str) -> None:
    """Raise ConfigurationError, naming hosts and versions, if ranks on these hosts could not work together.

    Patch versions of Python may differ, and builds of one torch.
    """
    for field, shown in _COMPARED.items():
        mine = comparable(field, getattr(driver, field))
        others = [host for host in hosts if comparable(field, getattr(host, field)) != mine]
        if others:
            found = ", ".join(f"{getattr(host, field)} on {host.name}" for host in others[:4])
            more = f" and {len(others) - 4} more" if len(others) > 4 else ""
            raise ConfigurationError(
                f"{shown} is {getattr(driver, field)} here and {found}{more}",
                hint=f"start the workers of {engine} from the same environment as this program",
                engine=engine,
            )
    first: dict[tuple[str, int], HostFacts] = {}
    for host in hosts:
        same = first.setdefault((host.node, host.pid), host)
        if same is not host:
            raise ConfigurationError(
                f"{same.name} and {host.name} are threads of one process, and a rank needs a process of its own",
                hint="start one worker process for each rank, as LocalCluster(processes=True) does",
                engine=engine,
                pid=host.pid,
            )


def visible_gpus(hosts: Sequence[HostFacts], rank: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a rank: all GPUs of its node's ranks, so that its local rank is the index of its own.

    Why all: peers on a node map each other's memory only if they see each other's devices. None without GPUs.
    """
    on_node = [host for host in hosts if host.node == hosts[rank].node]
    if not hosts[rank].gpus:
        return None
    firsts = [host.gpus[0] for host in on_node if host.gpus]
    rest = [gpu for host in on_node for gpu in host.gpus[1:]]
    return ",".join(dict.fromkeys([*firsts, *rest]))
