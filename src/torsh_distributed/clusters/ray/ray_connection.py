"""This process's connection to a Ray cluster: found, made or started, and ended again if it was made here.

Also the code that Ray carries for a submitted job. Ray starts a process with a runtime environment twice: one
interpreter prepares it, another replaces that one. The job's driver has its working directory unpacked, so ranks on
the driver's node only need to be told where it is.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from torsh_distributed.errors import CommunicationError, ConfigurationError, FeatureNotAvailable, first_line

_OLDEST = (2, 50)
_GCS_OPTION = "--gcs-address="
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Where Ray's job server tells a driver the job's runtime environment, which all its actors get."""
_IMPORT_TIMEOUT_S = 60.0
_MISSING = re.compile(r"No module named '?torsh_distributed\b")
INSTALL_HINT = (
    'install it where Ray runs (pip install "torsh-distributed[ray]" on every node), or let Ray do it: '
    'runtime_env={"pip": ["torsh-distributed[ray]"]}'
)


def require_ray() -> Any:
    """The package; raises FeatureNotAvailable with the line that installs it."""
    try:
        import ray
    except ImportError as error:
        raise FeatureNotAvailable(
            "Ray is not installed", hint='pip install "torsh-distributed[ray]"', reason=str(error)
        ) from error
    found = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if found < _OLDEST:
        raise FeatureNotAvailable(
            f"Ray {ray.__version__} is older than {_OLDEST[0]}.{_OLDEST[1]}",
            hint='pip install --upgrade "torsh-distributed[ray]"',
        )
    return ray


def lacks_package(said: str) -> bool:
    """Whether a message is about this library not being found."""
    return _MISSING.search(said) is not None


def require_package(ray: Any, group: Any, runtime_env: Mapping[str, Any], count: int) -> None:
    """Import this library in every bundle of the placement group; raises ConfigurationError where it is missing.

    For an actor that was lost at its start, of which Ray says nothing else. The task is one of Python's own functions:
    Ray can send it to a process that has nothing of this library.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task = ray.remote(importlib.import_module)
    refs = [
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
            **({"runtime_env": dict(runtime_env)} if runtime_env else {}),
        ).remote("torsh_distributed")
        for bundle in range(count)
    ]
    done, rest = ray.wait(refs, num_returns=len(refs), timeout=_IMPORT_TIMEOUT_S)
    for ref in rest:
        ray.cancel(ref, force=True)
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            if lacks_package(str(error)):
                raise ConfigurationError(
                    "torsh-distributed cannot be imported by Ray's workers", hint=INSTALL_HINT
                ) from error


def own_token() -> str | None:
    """This user's token for Ray clusters, from where Ray looks for it; None if there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() or None if path.is_file() else None


def cluster_of_this_job() -> str:
    """The address of the cluster that started this process, for a job that its job server runs; `auto` without one.

    Ray's job server tells its jobs the newest cluster of the machine, which is another one where two users have one.
    The node's own process, above the job's, knows better.
    """
    for parent in psutil.Process().parents():
        with suppress(psutil.Error):
            for word in parent.cmdline():
                if word.startswith(_GCS_OPTION):
                    return str(word.removeprefix(_GCS_OPTION))
    return "auto"


@contextmanager
def connected(address: str | None, *, runtime_env: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """`ray`, connected: over the connection there is, or one that lasts as long as this block.

    Without an address, RAY_ADDRESS or a running connection, a local cluster is started, without Ray's usage statistics,
    and ended after the block.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    chosen = address or os.environ.get("RAY_ADDRESS")
    try:
        if chosen:
            ray.init(address=chosen, runtime_env=dict(runtime_env or {}), log_to_driver=True)
        else:
            start_local(ray)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"there is no connection to the Ray cluster at {chosen or 'a new local one'}",
            hint="check the address and that `ray status` answers there; Ray's port is 6379, not the dashboard's",
            address=chosen,
            reason=first_line(error),
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def start_local(ray: Any, **arguments: Any) -> None:
    """Start a cluster on this machine, without usage statistics, and connect to it.

    Ray's own ports listen on the node's address, behind Ray's token; its dashboard on loopback.
    """
    before = os.environ.get("RAY_USAGE_STATS_ENABLED")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        ray.init(
            address="local",
            include_dashboard=arguments.pop("include_dashboard", False),
            dashboard_host="127.0.0.1",
            **arguments,
        )
    finally:
        if before is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = before


def refuse_ray_client(ray: Any) -> None:
    """Raise if this process speaks to the cluster through Ray Client, where placement and logs are another's."""
    if ray.util.client.ray.is_connected():
        raise ConfigurationError(
            "this program is connected through Ray Client (ray://), which has no part in the cluster",
            hint="submit the script with `torsh submit --to ray`, or run it on a node of the cluster",
        )


def totals_by_node(ray: Any) -> dict[str, dict[str, float]]:
    """The resources of every living node, by its address."""
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": dict(node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    }


def shown(resources: Mapping[str, float]) -> str:
    """Resources for a message: without those that only name a node."""
    parts = {
        name: amount / 2**30 if name in ("memory", "object_store_memory") else amount
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "bundle_", "CPU_group", "GPU_group"))
        and "_group_" not in name
        and name != "object_store_memory"
    }
    return ", ".join(f"{name} {amount:g}{' GiB' if name == 'memory' else ''}" for name, amount in parts.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedCode:
    """The working directory of a job, on this node and for others."""

    runtime_env: Mapping[str, Any]
    """Of actors on other nodes."""

    directory: str
    """Where it is on this node."""

    python_path: str
    """PYTHONPATH of a process that has it."""


def take_carried_code(*, own_variable: str) -> CarriedCode | None:
    """The job's code, if Ray is to carry nothing else; its actors then get no runtime environment by themselves.

    None leaves everything to Ray: for other parts of a runtime environment, such as packages and variables.
    `own_variable` is in the environment for the driver alone. Call this before `ray.init`.
    """
    config = json.loads(os.environ.get(_JOB_CONFIG, "{}"))
    runtime_env = dict(config.get("runtime_env") or {})
    variables = {name: value for name, value in runtime_env.pop("env_vars", {}).items() if name != own_variable}
    if variables or set(runtime_env) != {"working_dir"}:
        return None
    os.environ[_JOB_CONFIG] = json.dumps({**config, "runtime_env": {}})
    return CarriedCode(runtime_env=runtime_env, directory=str(Path.cwd()), python_path=os.environ.get("PYTHONPATH", ""))
