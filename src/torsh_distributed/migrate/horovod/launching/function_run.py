"""`horovod.run`: call a function on several ranks of this machine and return what each returned."""

from __future__ import annotations

import importlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, ProcessFailure, SerializationError
from torsh_distributed.launch.spawn import spawn
from torsh_distributed.migrate.command_lines import RUN_AS_VARIABLE
from torsh_distributed.migrate.stand_in import install

_log = logging.getLogger(__name__)

_LOCAL_HOSTS = ("localhost", "127.0.0.1")
_REFUSED = {
    "hostfile": "start the script with `torsh run --as horovod --hostfile FILE` on every host",
    "host_discovery_script": "start the script with `torsh run --as horovod --host-discovery-script FILE`",
    "ssh_port": "workers are started on this machine; on others start `torsh run` there",
    "ssh_identity_file": "workers are started on this machine; on others start `torsh run` there",
    "mpi_args": "no MPI is underneath",
    "executable": "workers run under this interpreter",
    "output_filename": "start the script with `torsh run --log-dir`",
}
"""Arguments of Horovod's that have no counterpart here, and what to do."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    host_discovery_script: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` on `num_proc` ranks of this machine; returns the results by rank.

    `reset_limit`: how often all ranks are started again after a failure. Raises RuntimeError if a rank fails in the
    end. Without cloudpickle the function must be defined at the top of a module.
    """
    refused = {
        "hostfile": hostfile,
        "host_discovery_script": host_discovery_script,
        "ssh_port": ssh_port,
        "ssh_identity_file": ssh_identity_file,
        "mpi_args": mpi_args,
        "executable": executable,
        "output_filename": output_filename,
    }
    for name, value in refused.items():
        if value is not None:
            raise FeatureNotAvailable(f"horovod.run({name}=…) is not supported", hint=_REFUSED[name], **{name: value})
    without_effect = {
        "max_num_proc": max_num_proc if max_num_proc is not None else max_np,
        "slots": slots,
        "cooldown_range": cooldown_range,
        "start_timeout": start_timeout,
        "network_interface": network_interface or network_interfaces,
    }
    for name, value in without_effect.items():
        if value is not None:
            _log.warning("horovod.run(%s=…) has no effect: so many ranks as asked for start on this machine", name)
    if use_mpi:
        raise FeatureNotAvailable("horovod.run(use_mpi=True) is not supported", hint="leave it out: no MPI is needed")
    count = _num_ranks(num_proc if num_proc is not None else np, hosts)
    least = min_num_proc if min_num_proc is not None else min_np
    if least is not None and least > count:
        raise InvalidArgument("min_num_proc is above num_proc", min_num_proc=least, num_proc=count)
    call = _pack(func, tuple(args), kwargs or {})
    try:
        with _standing_in():
            return spawn(_call, count, args=(call,), max_restarts=reset_limit or 0)
    except ProcessFailure as error:
        raise RuntimeError(
            "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. {error.message}: exit code {error.context.get('exit_code')}"
        ) from error


def _num_ranks(wanted: int | None, hosts: str | None) -> int:
    if hosts is None:
        return wanted or 1
    total = 0
    for part in hosts.split(","):
        name, _, count = part.strip().partition(":")
        if name not in _LOCAL_HOSTS:
            raise FeatureNotAvailable(
                "horovod.run starts ranks on this machine only",
                hint="start the script with `torsh run --as horovod -H …` on every host",
                host=name,
            )
        total += int(count or 1)
    if wanted is not None and wanted > total:
        raise InvalidArgument("num_proc is above the slots of hosts", num_proc=wanted, slots=total)
    return wanted or total


def _pack(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        pickler = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        packed: bytes = pickler.dumps((func, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SerializationError(
            "the function or its arguments cannot be sent to the ranks",
            hint="define the function at the top of a module, or install cloudpickle",
            function=repr(func),
            reason=str(error),
        ) from error
    return packed


@contextmanager
def _standing_in() -> Iterator[None]:
    """Workers find `horovod` before the function's module is imported there."""
    before = os.environ.get(RUN_AS_VARIABLE)
    os.environ[RUN_AS_VARIABLE] = "horovod"
    try:
        yield
    finally:
        if before is None:
            del os.environ[RUN_AS_VARIABLE]
        else:
            os.environ[RUN_AS_VARIABLE] = before


def _call(call: bytes) -> Any:
    """In a worker."""
    install("horovod")
    func, args, kwargs = pickle.loads(call)  # noqa: S301 - from our own launcher, through a private directory
    return func(*args, **kwargs)
