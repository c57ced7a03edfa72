"""A parameter server that is killed in the middle, by SIGKILL, and loses nothing.

    python examples/remote/parameter_server.py

One process serves, this one trains with it. The losses are those of training without a server.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile

import torch
from torch import nn

from torsh_distributed import rpc
from torsh_distributed.rpc.parameters import ParameterClient, serve

NUM_STEPS = 20


def model() -> nn.Module:
    """The same for both."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_of(network: nn.Module, step: int) -> torch.Tensor:
    """Of one batch."""
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    return nn.functional.mse_loss(network(inputs), inputs.sum(dim=1, keepdim=True))


def train_locally() -> list[float]:
    """What the server has to equal."""
    network = model()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(network, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_a_server() -> list[float]:
    """The optimizer and its state live at the server."""
    network, losses = model(), []
    with ParameterClient(["ps"]) as client:
        client.create(dict(network.named_parameters()), optimizer="Adam", lr=0.01)
        for step in range(NUM_STEPS):
            client.pull_into(network)
            network.zero_grad()
            loss = loss_of(network, step)
            loss.backward()
            losses.append(loss.item())
            if step in (5, 11):
                os.kill(rpc.worker_info("ps").pid, signal.SIGKILL)
                print(f"step {step}: the server was killed")
            client.push_from(network)
    return losses


def main() -> None:
    """Serve in one process, train in the other."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/store"
        server = multiprocessing.get_context("fork").Process(target=serve, args=("ps",), kwargs={"store": url})
        server.start()
        rpc.start("trainer", store=url)
        try:
            losses = train_with_a_server()
        finally:
            rpc.shutdown()
            server.terminate()
            server.join()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, as without a server: {losses == train_locally()}")


if __name__ == "__main__":
    main()
