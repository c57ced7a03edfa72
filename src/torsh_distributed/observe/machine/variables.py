"""The variables of a job: present, numbers, consistent, and not those of another one. Pure: reads the given mapping."""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterator, Mapping

from torsh_distributed.known_variables import DEFAULT_MASTER_PORT, KNOWN, REMOVED, RENAMED
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity, DiagnosticResult

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT")


def check_variables(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    """Everything about variables; one result that says so if nothing is wrong."""
    found = list(_not_numbers(environ))
    if not found:
        found = [*_places(environ), *_master(environ), *_threads(environ), *_debugging(environ)]
    found += [*_misspelt(environ), *_old(environ)]
    yield from found or [DiagnosticResult(check_name="variables", description=_summary(environ))]


def _summary(environ: Mapping[str, str]) -> str:
    if "RANK" not in environ:
        return "no job's variables are set: a launcher sets them for its workers"
    return f"rank {environ['RANK']} of {environ.get('WORLD_SIZE', '?')}: consistent"


def _not_numbers(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    for name in _NUMBERS:
        value = environ.get(name)
        if value is not None and not value.strip().isdigit():
            yield _error(
                name, f"{name}={value!r} is not a number", "every rank reads it", f"unset {name}, or correct it"
            )


def _misspelt(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    ours = [name for name in KNOWN if name.startswith("TORSH_")]
    for name in sorted(environ):
        if name.startswith("TORSH_") and name not in KNOWN and not name.startswith(("TORSH_PLAN__", "TORSH_TEST_")):
            near = difflib.get_close_matches(name, ours, n=1)
            yield _warning(
                name,
                f"{name} is not a variable of this library",
                "it has no effect",
                f"did you mean {near[0]}?" if near else "`torsh env` lists them",
            )


def _old(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    """Names that NCCL or torch have given up."""
    for name, new in RENAMED.items():
        if name in environ:
            yield _warning(name, f"{name} is now called {new}", "the old name may stop working", f"set {new} instead")
    for name, new in REMOVED.items():
        if name in environ:
            yield _warning(name, f"NCCL no longer reads {name}", "it has no effect", f"see {new}, or unset {name}")


def _places(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local, local_world = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    node = _number(environ, "NODE_RANK")
    node = _number(environ, "GROUP_RANK") if node is None else node
    if (rank is None) != (world is None):
        have, lack = ("RANK", "WORLD_SIZE") if rank is not None else ("WORLD_SIZE", "RANK")
        yield _error(
            lack,
            f"{have} is set and {lack} is not",
            "a rank needs both",
            f"set {lack}, or unset {have} and use a launcher",
        )
        return
    if rank is None or world is None:
        return
    if rank >= world:
        yield _error(
            "RANK",
            f"RANK={rank} is outside 0..{world - 1} (WORLD_SIZE={world})",
            "ranks count from 0",
            "let the launcher set them; WORLD_SIZE is nodes × workers per node",
        )
    if local is not None and local_world is not None and local >= local_world:
        yield _error(
            "LOCAL_RANK",
            f"LOCAL_RANK={local} is outside 0..{local_world - 1} (LOCAL_WORLD_SIZE={local_world})",
            "it counts the workers of one node, and picks the GPU",
            "if it is the rank in the whole job, put it into RANK instead",
        )
    num_nodes = -(-world // local_world) if local_world else None
    if node is not None and num_nodes is not None:
        if node >= num_nodes:
            yield _error(
                "NODE_RANK",
                f"NODE_RANK={node}, but {world} ranks with {local_world} on each node are {num_nodes} nodes",
                "it looks like a rank of the job: scripts that export SLURM_PROCID or PBS_TASKNUM as NODE_RANK do this",
                "NODE_RANK counts machines: use SLURM_NODEID or the index of the host",
            )
        elif local is not None and local_world is not None and rank != node * local_world + local:
            is_local = rank == local
            yield _error(
                "RANK",
                f"RANK={rank}, but worker {local} of node {node} with {local_world} each is "
                f"rank {node * local_world + local}",
                "RANK has the value of LOCAL_RANK: two processes will claim one rank" if is_local else "they disagree",
                "RANK = NODE_RANK × LOCAL_WORLD_SIZE + LOCAL_RANK",
            )
    if environ.get("TORSH_LAUNCHER") is None and environ.get("TORCHELASTIC_RUN_ID") is None and world > 1:
        yield DiagnosticResult(
            check_name="RANK",
            severity=CheckSeverity.NOTE,
            description=f"RANK={rank} and WORLD_SIZE={world} are set in this shell, by no launcher that is known here",
            reason="a job started from here would inherit them; `torsh run` overrides them",
            remediation="unset RANK WORLD_SIZE LOCAL_RANK if this is not a worker",
        )


def _master(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    world, local_world = _number(environ, "WORLD_SIZE"), _number(environ, "LOCAL_WORLD_SIZE")
    address = environ.get("MASTER_ADDR")
    port = _number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        yield _error(
            "MASTER_PORT", f"MASTER_PORT={port} is not a port", "ports are 1 to 65535", f"use {DEFAULT_MASTER_PORT}"
        )
    if world is None or world == 1:
        return
    if address is None and environ.get("TORSH_STORE") is None:
        yield _error(
            "MASTER_ADDR",
            f"WORLD_SIZE={world}, but MASTER_ADDR is not set",
            "ranks meet at the node of rank 0",
            "set it to that node's address on every node, or let a launcher do it",
        )
    elif address is not None and local_world is not None and world > local_world and _is_loopback(address):
        yield _error(
            "MASTER_ADDR",
            f"MASTER_ADDR={address} is this machine itself, but the job has {-(-world // local_world)} nodes",
            "each node would wait for ranks that look for it elsewhere",
            "set it to the address of node 0 that the others reach",
        )


def _threads(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    threads, workers = _number(environ, "OMP_NUM_THREADS"), _number(environ, "LOCAL_WORLD_SIZE") or 1
    cores = len(os.sched_getaffinity(0))
    if threads is not None and threads * workers > 2 * cores:
        yield DiagnosticResult(
            check_name="OMP_NUM_THREADS",
            severity=CheckSeverity.WARNING,
            description=f"{workers} workers × {threads} threads are {threads * workers} on {cores} cores",
            reason="they take turns, and every operator waits for the slowest",
            remediation=f"set OMP_NUM_THREADS={max(1, cores // workers)}",
            data={"threads": threads * workers, "cores": cores},
        )


def _debugging(environ: Mapping[str, str]) -> Iterator[DiagnosticResult]:
    slow = {
        "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
        "TORSH_DEBUG": "every collective is compared between the ranks first",
        "TORCH_DISTRIBUTED_DEBUG": "torch checks every collective if it is DETAIL",
        "NCCL_P2P_DISABLE": "GPUs exchange through host memory",
        "NCCL_SHM_DISABLE": "processes of one node exchange over the network",
    }
    for name, effect in slow.items():
        value = environ.get(name, "")
        if value not in ("", "0", "OFF", "INFO"):
            yield DiagnosticResult(
                check_name=name,
                severity=CheckSeverity.NOTE,
                description=f"{name}={value}: {effect}",
                reason="slow; meant for finding a bug",
                remediation=f"unset {name} for real runs",
            )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "")
    return int(value) if value.strip().isdigit() else None


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _error(name: str, description: str, reason: str, remediation: str) -> DiagnosticResult:
    return DiagnosticResult(
        check_name=name, severity=CheckSeverity.ERROR, description=description, reason=reason, remediation=remediation
    )


def _warning(name: str, description: str, reason: str, remediation: str) -> DiagnosticResult:
    return DiagnosticResult(
        check_name=name,
        severity=CheckSeverity.WARNING,
        description=description,
        reason=reason,
        remediation=remediation,
    )
