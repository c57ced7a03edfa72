"""`init()`: join the job, under any launcher, and bring up the process group."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed import known_variables
from torsh_distributed.comm.collectives.call import enable_checks
from torsh_distributed.comm.groups.process_group import destroy_process_group, start_world
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.worker.environment import Environment, read_environment
from torsh_distributed.launch.worker.init_method import place_for
from torsh_distributed.launch.worker.launcher_line import JOIN_VARIABLE, join_late
from torsh_distributed.launch.worker.recording.energy_recording import record_energy
from torsh_distributed.launch.worker.recording.event_recording import record_events, report_metrics
from torsh_distributed.log_level import set_log_level
from torsh_distributed.observe.metrics.process_metrics import note_fact
from torsh_distributed.observe.settings import ObserveSettings
from torsh_distributed.plan import ObserveConfig, Plan, RetryConfig

_log = logging.getLogger(__name__)


def init(
    plan: Plan | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    init_method: str = "env://",
    device_id: torch.device | str | int | None = None,
) -> Environment:
    """Join the job this process was started for, under any launcher; every rank calls this once.

    Reads the variables of `torsh run`, torchrun, Open MPI, MPICH, SLURM, PBS, or RANK and WORLD_SIZE; with none of them
    the world has one rank. Arguments win over TORSH_INIT_TIMEOUT, that over the plan, the plan over the defaults.
    `backend` is ours, torch's, or one that another package has registered with torch. `init_method` is where
    ranks meet, as in torch: the launcher's address, `tcp://host:port` or `file:///path`. `device_id` is the device of
    this rank, instead of the GPU of its local rank; the group is bound to it. With a plan that sets `training.steps`,
    whoever looks at the job sees how long it will take, also where the loop is the script's own.
    Returns the place that was found and where it was found.
    """
    chosen = plan or Plan()
    section = chosen.distributed
    _observe(chosen.observe)
    found, store = place_for(init_method, read_environment())
    limit_s = timeout_s if timeout_s is not None else _init_timeout_s(section.timeout_s)
    if section.backend_module:
        _import_backend(section.backend_module)
    _start(
        backend or section.backend,
        found,
        limit_s,
        store=store,
        retry=chosen.retry,
        fallback=section.fallback,
        device=_device(device_id),
    )
    if "steps" in chosen.training.model_fields_set:  # for loops without an Engine; the default says nothing about them
        note_fact("total_steps", chosen.training.steps)
    if chosen.green.enabled:
        record_energy(chosen.green, found)
    return found


@contextmanager
def distributed(plan: Plan | None = None, *, backend: str | None = None) -> Iterator[Environment]:
    """`init()` for the length of a `with` block; the group is destroyed after it, also if the block raises."""
    found = init(plan, backend=backend)
    try:
        yield found
    finally:
        destroy_process_group()


def init_process_group(
    backend: str = "auto",
    rank: int | None = None,
    world_size: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    timeout: float | timedelta = 300.0,
    *,
    init_method: str = "env://",
    store: dist.Store | None = None,
    fallback: Sequence[str] = (),
    device_id: torch.device | str | int | None = None,
) -> None:
    """Bring up the world's group with explicit values; the rest is read from the environment.

    `timeout` (seconds) bounds the meeting of the ranks and each later collective. Duplicate ranks, differing world
    sizes and absent ranks raise on every rank, by name. `fallback` names what to take if some rank cannot use
    `backend`. `init_method` and `device_id` are those of `init`; `store` replaces what `init_method` leads to.
    """
    _observe(ObserveConfig())
    if store is not None and init_method != "env://":
        raise InvalidArgument(
            "init_method and store are two places to meet", hint="give one of them", init_method=init_method
        )
    found, met_in = place_for(init_method, read_environment())
    store = store or met_in
    given: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "master_addr": master_addr,
        "master_port": master_port,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        # A place given by hand is taken whole: the launcher's nodes and store no longer fit it.
        given.update(source=f"arguments {', '.join(given)}", local_rank=None, local_world_size=None, node_rank=None)
        given["has_agent_store"] = found.has_agent_store and master_addr is None and master_port is None
    limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    place = dataclasses.replace(found, **given)
    _start(backend, place, limit_s, store=store, fallback=fallback, device=_device(device_id))


def _observe(section: ObserveConfig) -> None:
    """Speak to the launcher; follow TORSH_LOG, TORSH_EVENTS_DIR (over the plan), TORSH_PROGRESS_FILE, …"""
    join_late()
    set_log_level(os.environ)
    record_events(directory=section.events_dir)
    report_metrics(ObserveSettings.from_plan(section))
    enable_checks(known_variables.is_on("TORSH_DEBUG"))


def _start(
    backend: str,
    place: Environment,
    timeout_s: float,
    *,
    store: dist.Store | None,
    retry: RetryConfig | None = None,
    fallback: Sequence[str] = (),
    device: torch.device | None = None,
) -> None:
    rank, world_size = place.rank, place.world_size
    if JOIN_VARIABLE in os.environ and store is None:
        # The others train already: alone until the first batch, when the Engine enters their world.
        rank, world_size, store = 0, 1, dist.HashStore()
    start_world(
        backend,
        rank=rank,
        world_size=world_size,
        master_addr=place.master_addr,
        master_port=place.master_port,
        timeout_s=timeout_s,
        store=store,
        has_agent_store=place.has_agent_store,
        attempt=place.attempt,
        node=None if place.node_rank is None else f"node-{place.node_rank}",
        num_local_ranks=place.local_world_size,
        retry=retry,
        fallback=fallback,
        device=device,
    )
    _log.info("joined as %s", place)


def _import_backend(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise FeatureNotAvailable(
            f"distributed.backend_module {module!r} cannot be imported: {error}",
            hint="install the package that provides the backend on every node, or correct the name",
            feature=module,
        ) from error


def _device(device_id: torch.device | str | int | None) -> torch.device | None:
    """The device that was given; a number is that of a GPU. Raises InvalidArgument if this process does not see it."""
    if device_id is None:
        return None
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type == "cuda" and not (device.index is not None and device.index < torch.cuda.device_count()):
        raise InvalidArgument(
            "device_id is a GPU that this process sees, with its number, or the CPU",
            hint="check CUDA_VISIBLE_DEVICES, or leave device_id out to take the GPU of the local rank",
            device_id=str(device),
            visible_gpus=torch.cuda.device_count(),
        )
    return device


def _init_timeout_s(planned_s: float) -> float:
    text = os.environ.get("TORSH_INIT_TIMEOUT")
    if text is None:
        return planned_s
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigurationError(
            "TORSH_INIT_TIMEOUT must be a number of seconds above 0",
            hint="set it to 300, or unset it",
            TORSH_INIT_TIMEOUT=text,
        )
    return value
