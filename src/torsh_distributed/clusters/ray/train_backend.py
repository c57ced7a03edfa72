"""Ray Train on our backends: `TorshTrainer`, or `TorchTrainer` with a `TorshTorchConfig`.

Ray Train starts the workers, restarts them, keeps checkpoints and shows metrics, as ever. The process group is ours:
the ranks meet in a store that asks for a secret, those of a node share memory, and `td.parallelize` finds the world up.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from typing_extensions import override

from torsh_distributed.clusters.hosted.rank_host import HostFacts, own_facts
from torsh_distributed.clusters.hosted.rank_variables import HostedEndpoint, places_on, rank_variables
from torsh_distributed.comm.trust.job_secret import SECRET_FILE_VARIABLE, new_secret, write_secret_file

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine

_stores: list[Any] = []
"""The store of the worker of rank 0, for as long as its process lives."""
_secrets = ExitStack()
"""Removes the file of the job's secret."""


@dataclass
class TorshTorchConfig(TorchConfig):  # type: ignore[misc]  # Ray is untyped
    """`TorchConfig` for our process group; `backend` is as in a plan's `distributed.backend`."""

    backend: str = "auto"

    @property
    @override
    def backend_cls(self) -> type[Backend]:
        """What brings the group up on Ray Train's workers."""
        return _TorshBackend


class _TorshBackend(Backend):  # type: ignore[misc]  # Ray is untyped
    """Brings our world up on Ray Train's workers, and takes it down."""

    # A rank's local rank is then the index of its own GPU, and ranks of a node see each other's.
    share_cuda_visible_devices: bool = True

    @override
    def on_start(self, worker_group: Any, backend_config: TorshTorchConfig) -> None:
        facts: list[HostFacts] = worker_group.execute(_describe)
        is_local = len({one.network for one in facts}) == 1
        address = "127.0.0.1" if is_local else facts[0].address
        secret = new_secret()
        port = worker_group.execute_single(0, _serve_store, address, secret)
        endpoint = HostedEndpoint(
            engine="ray",
            name="ray-train",
            attempt=0,
            max_restarts=0,
            master_addr=address,
            master_port=port,
        )
        ray.get(
            [
                worker_group.execute_single_async(
                    place.rank,
                    _enter_world,
                    rank_variables(place, endpoint, member=place.rank),
                    secret,
                    backend_config.backend,
                    float(backend_config.timeout_s),
                )
                for place in places_on([one.node for one in facts])
            ]
        )

    @override
    def on_shutdown(self, worker_group: Any, backend_config: TorshTorchConfig) -> None:
        ray.get(worker_group.execute_async(_leave_world))


def _describe() -> HostFacts:
    address = ray.util.get_node_ip_address()
    return own_facts(f"Ray Train worker on {address}", address=address)


def _serve_store(address: str, secret: str) -> int:
    """In the worker of rank 0."""
    from torsh_distributed.comm.store.tcp.tcp_server import TcpStoreServer

    server = TcpStoreServer(address, 0, token=secret)
    _stores[:] = [server]
    return server.port


def _enter_world(variables: Mapping[str, str], secret: str, backend: str, timeout_s: float) -> None:
    """In every worker, before the training function."""
    from torsh_distributed.launch.worker.init import init

    folder = tempfile.mkdtemp(prefix="torsh-ray-train-")
    # Removed when the world is left, or at exit: Ray may end this process without either of them.
    _secrets.callback(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(_secrets.close)
    write_secret_file(Path(folder) / "secret", secret)
    os.environ.update({**variables, SECRET_FILE_VARIABLE: str(Path(folder) / "secret")})
    init(backend=backend, timeout_s=timeout_s)


def _leave_world() -> None:
    from torsh_distributed.comm.groups.process_group import destroy_process_group

    destroy_process_group()
    _secrets.close()
    while _stores:
        _stores.pop().close()


class TorshTrainer(TorchTrainer):  # type: ignore[misc]  # Ray is untyped
    """Ray Train's `TorchTrainer`, with the same arguments, on our backends.

    The training function finds the process group up: it calls `td.parallelize`, not `td.init`.
    """

    def __init__(
        self, train_loop_per_worker: Any, *, torch_config: TorchConfig | None = None, **arguments: Any
    ) -> None:
        super().__init__(train_loop_per_worker, torch_config=torch_config or TorshTorchConfig(), **arguments)


def report_to_ray(engine: Engine, metrics: Mapping[str, Any] | None = None, *, with_checkpoint: bool = False) -> None:
    """Report metrics to Ray Train, with the Engine's step among them, and its checkpoint if wanted; every rank calls.

    The ranks write one checkpoint into a directory that they share: a temporary one on a single node, below the run's
    storage path on several. Rank 0 hands it to Ray.
    """
    from torsh_distributed.comm.collectives.objects import broadcast_object
    from torsh_distributed.comm.groups import process_group

    values = {"step": engine.num_steps, **(metrics or {})}
    if not with_checkpoint:
        ray.train.report(values)
        return
    is_first = process_group.rank() == 0
    folder: str | None = None
    if is_first:
        folder = tempfile.mkdtemp(prefix="torsh-ray-checkpoint-", dir=_shared_place())
    folder = broadcast_object(folder, src=0)
    assert folder is not None, "rank 0 made it"
    try:
        engine.save(folder)
        ray.train.report(values, checkpoint=ray.train.Checkpoint.from_directory(folder) if is_first else None)
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


def _shared_place() -> str | None:
    """Where all ranks can write: anywhere on one node, the storage path on several."""
    from torsh_distributed.comm.groups import process_group

    if len(process_group.roster().node_order) == 1:
        return None
    storage = ray.train.get_context().get_storage()
    place = Path(storage.experiment_fs_path)
    place.mkdir(parents=True, exist_ok=True)
    return str(place)


def resume_from_ray(engine: Engine) -> bool:
    """Load the checkpoint that Ray Train gives a restarted run; whether there was one. Every rank calls this."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        engine.load(folder)
    return True
