"""Publishing weights: a trainer goes on while a follower evaluates what was published, never something half written.

    python examples/remote/follower.py

Both are threads of one process here; elsewhere they are processes of a job, and the follower may come at any time.
"""

from __future__ import annotations

import threading

import torch
from torch import nn

from torsh_distributed.comm.store import open_store
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.parameters import ParameterClient, ParameterFollower, ParameterServer

NUM_STEPS, PUBLISH_EVERY = 60, 20


def loss_of(network: nn.Module) -> torch.Tensor:
    """A line through the origin."""
    inputs = torch.linspace(-1, 1, 32)[:, None]
    return nn.functional.mse_loss(network(inputs), 3 * inputs)


def train(client: ParameterClient) -> None:
    """Publishes now and then."""
    network = nn.Linear(1, 1)
    client.create(dict(network.named_parameters()), lr=0.1)
    for step in range(NUM_STEPS):
        client.pull_into(network)
        network.zero_grad()
        loss_of(network).backward()
        client.push_from(network)
        if step % PUBLISH_EVERY == PUBLISH_EVERY - 1:
            client.publish()


def main() -> None:
    """One server, a trainer and a follower."""
    with (
        open_store("memory://") as store,
        ParameterServer("ps", store=store),
        RpcWorker("trainer", store) as trainer,
        RpcWorker("evaluator", store) as evaluator,
        ParameterClient(["ps"], worker=trainer) as client,
    ):
        training = threading.Thread(target=train, args=(client,))
        training.start()
        follower = ParameterFollower(["ps"], worker=evaluator)
        network = nn.Linear(1, 1)
        while follower.number < NUM_STEPS // PUBLISH_EVERY:
            found = follower.next_into(network)
            print(f"publication {found.number}, version {found.versions['ps']}: loss {loss_of(network).item():.4f}")
        training.join()


if __name__ == "__main__":
    main()
