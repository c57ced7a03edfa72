"""One Ray of four pretended cores for the tests of a module: starting it takes seconds."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# Set by Ray, and by a library of its own, when they are first imported: no test changes them then.
os.environ.setdefault("RAY_CLIENT_MODE", "0")
os.environ.setdefault("CRC32C_SW_MODE", "auto")

ROOT = Path(__file__).parents[3]
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # No worker for every core before a test asks for one: each is an interpreter that imports Ray.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


@contextlib.contextmanager
def quiet_ray(folder: Path) -> Iterator[Any]:
    """The package, with its token in a directory of the test and nothing that it need not say."""
    import warnings

    before = dict(os.environ)
    # Actors unpack functions of this package: they find it whatever the directory is that Ray starts them in.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update({**_QUIET, "PYTHONPATH": path, "RAY_AUTH_TOKEN_PATH": str(folder / "token")})
    (folder / "token").write_text("a-token-of-the-tests-0123456789abcdef")
    (folder / "token").chmod(0o600)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        import ray

        try:
            yield ray
        finally:
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def own_agent_port() -> Iterator[None]:
    """Ray's agent on a port that is free: `ray.init` gives every Ray of a machine the same, so two have one agent."""
    from ray._private.parameter import RayParams

    with_any_port = partialmethod(RayParams.__init__, dashboard_agent_listen_port=0)
    with mock.patch.object(RayParams, "__init__", with_any_port):
        yield


@contextlib.contextmanager
def local_ray(folder: Path, **arguments: Any) -> Iterator[Any]:
    """Ray with its token, logs and sockets in a directory of the test."""
    from torsh_distributed.clusters.ray.ray_connection import start_local

    with quiet_ray(folder) as ray:
        with own_agent_port():
            start_local(ray, num_cpus=4, log_to_driver=False, **arguments)
        yield ray


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A real local cluster."""
    with local_ray(tmp_path_factory.mktemp("ray")) as ray:
        yield ray
