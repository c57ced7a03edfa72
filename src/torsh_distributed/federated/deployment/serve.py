"""`serve_devices`: a federated run with devices that join over TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated.deployment.device_heartbeat import HeartbeatSettings
from torsh_distributed.federated.deployment.device_links import LinkAdaptation
from torsh_distributed.federated.deployment.entry.discovery import announced
from torsh_distributed.federated.deployment.round_server import RoundServer
from torsh_distributed.federated.federated_config import FederatedConfig, config_of
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.random_seeds import derived_seed, drawing_as_of
from torsh_distributed.federated.rounds.round_loop import FederatedResult, RoundLoop, RoundRecord


def serve_devices(
    task: FederatedTask,
    *,
    directory: str | Path,
    config: FederatedConfig | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    num_tokens: int = 0,
    announces: bool = False,
    revoked: Sequence[str] = (),
    deadline_s: float = 600.0,
    heartbeat: HeartbeatSettings | None = None,
    links: LinkAdaptation | None = None,
    say: Callable[[str], None] = print,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> FederatedResult:
    """Train with devices until the rounds are done. Killed and started again, it goes on with the same round.

    `say` gets the address and new enrolment tokens, each of which lets one device in. `announces`: devices on the
    local network may find the server by mDNS.
    """
    directory = Path(directory)
    config = config or config_of(task)
    server = open_server(
        task, config, directory=directory, host=host, port=port, deadline_s=deadline_s, heartbeat=heartbeat, links=links
    )
    is_done = False
    try:
        loop = RoundLoop(task, config, server, directory=directory)  # first: one process has a directory
        for name in revoked:
            server.revoke(name)
        say(f"serving {server.address[0]}:{server.address[1]}")
        for _ in range(num_tokens):
            say(f"token {server.new_token()}")
        with announced(server.address, server.digest) if announces else contextlib.nullcontext():
            result = loop.run(on_round)
        is_done = True
    finally:
        server.close(is_done=is_done)
    return result


def open_server(
    task: FederatedTask,
    config: FederatedConfig,
    *,
    directory: Path,
    host: str,
    port: int,
    deadline_s: float,
    heartbeat: HeartbeatSettings | None,
    links: LinkAdaptation | None,
) -> RoundServer:
    """A server for devices with the task's model."""
    with drawing_as_of(derived_seed(config.seed, "model")):  # devices make the same integer buffers
        replica = ModelVector(task.model())
    if links is not None and replica.dtype != torch.float32:
        raise ConfigurationError("codecs are for models of float32", hint="leave links (--adapt-links) out")
    return RoundServer(
        config,
        directory=directory,
        fingerprint=replica.fingerprint,
        numel=replica.numel,
        host=host,
        port=port,
        deadline_s=deadline_s,
        heartbeat=heartbeat,
        links=links,
    )
