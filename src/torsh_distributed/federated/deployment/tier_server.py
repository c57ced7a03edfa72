"""A tier on real devices: a server of its own devices that is a device of the tier above it.

For each round above it has `period` rounds with its own devices, from the model that it was given, and answers with
what they come to. What the tiers share is the model and the epochs; strategy, rule, codecs, selection and secure
aggregation are each tier's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated.deployment.device_client import DeviceClient
from torsh_distributed.federated.deployment.device_heartbeat import HeartbeatSettings
from torsh_distributed.federated.deployment.device_links import LinkAdaptation
from torsh_distributed.federated.deployment.serve import open_server
from torsh_distributed.federated.federated_config import FederatedConfig, config_of
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.rounds.round_loop import RoundLoop, RoundRecord


class _TierTask(FederatedTask):
    """Work of the tier above, as rounds with this tier's devices."""

    def __init__(
        self, task: FederatedTask, loop: RoundLoop, period: int, on_round: Callable[[RoundRecord], None] | None
    ) -> None:
        self._task = task
        self._loop = loop
        self._period = period
        self._on_round = on_round
        self._weight = 1

    @override
    def model(self) -> nn.Module:
        return self._task.model()

    @override
    def device_data(self, device: str) -> None:
        """Its data are its devices'."""

    @override
    def num_samples(self, data: Any) -> int:
        """What the last round's updates weighed together: the samples, where they are known."""
        return self._weight

    @override
    def train(self, model: nn.Module, data: Any, epochs: int) -> Mapping[str, float]:
        whole = ModelVector(model)
        record, self._weight = self._loop.run_from(whole.read(), epochs, self._period, self._on_round)
        whole.write(self._loop.vector)
        return {name.removeprefix("client_"): value for name, value in record.figures.items()}


def serve_tier(
    task: FederatedTask,
    upstream: tuple[str, int] | None,
    *,
    name: str,
    directory: str | Path,
    period: int = 1,
    token: str | None = None,
    config: FederatedConfig | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    num_tokens: int = 0,
    deadline_s: float = 600.0,
    heartbeat: HeartbeatSettings | None = None,
    links: LinkAdaptation | None = None,
    give_up_s: float = 60.0,
    say: Callable[[str], None] = print,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> int:
    """Take part in the upstream's run with the devices of this tier; returns how many updates were sent.

    `upstream`: None finds it on the local network. `token`: of the upstream, the first time. `deadline_s`: of each
    round with the tier's devices; the upstream's has to be longer than `period` of them.
    """
    if period < 1:
        raise InvalidArgument("a tier has at least one round with its devices for each above it", period=period)
    directory = Path(directory)
    config = replace(config or config_of(task), rounds=0)
    if config.buffer is not None:
        raise ConfigurationError(
            "a tier's rounds begin with the model of the tier above, which updates of a buffer did not",
            hint="leave buffer out here; the tier above may have one",
        )
    server = open_server(
        task, config, directory=directory, host=host, port=port, deadline_s=deadline_s, heartbeat=heartbeat, links=links
    )
    is_done = False
    try:
        loop = RoundLoop(task, config, server, directory=directory)  # first: one process has a directory
        say(f"serving {server.address[0]}:{server.address[1]}")
        for _ in range(num_tokens):
            say(f"token {server.new_token()}")
        client = DeviceClient(
            _TierTask(task, loop, period, on_round),
            upstream,
            name=name,
            directory=directory / "upstream",
            token=token,
            give_up_s=give_up_s,
        )
        num_updates = client.run()
        is_done = True
    finally:
        server.close(is_done=is_done)
    return num_updates
