"""Observers and an agent by torch's names for remote calls; only the import is this library's.

The agent keeps a policy and asks observers, each in its own process, to play an episode. They ask it for every action,
first one by one, then in batches: the reply to all of them is sent when the last one has asked.

    python examples/remote/torch_observers.py
"""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import torsh_distributed.rpc as rpc  # in place of torch.distributed.rpc

NUM_OBSERVERS = 2
NUM_STEPS = 20


def call_method(method: Any, reference: Any, *args: Any) -> Any:
    """Runs at the owner of the reference."""
    return method(reference.local_value(), *args)


class Corridor:
    """A walk of ten fields: right is rewarded."""

    def __init__(self) -> None:
        self.place = 0

    def step(self, action: int) -> tuple[Tensor, float]:
        """Go on; the new state and the reward."""
        self.place = max(0, min(9, self.place + (1 if action else -1)))
        return self.state(), float(action)

    def state(self) -> Tensor:
        """Where one is."""
        return torch.tensor([self.place / 9.0])


class Observer:
    """Plays episodes with the actions that the agent gives."""

    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id

    def run_episode(self, agent: Any, in_batches: bool) -> float:
        """The reward of one walk."""
        corridor = Corridor()
        state, total = corridor.state(), 0.0
        for _ in range(NUM_STEPS):
            if in_batches:
                action = rpc.rpc_sync(agent.owner(), Agent.select_in_a_batch, args=(agent, self.id, state))
            else:
                action = agent.rpc_sync().select_action(self.id, state)
            state, reward = corridor.step(action)
            total += reward
        return total


class Agent:
    """Has the policy, and learns from what the observers were rewarded for."""

    def __init__(self) -> None:
        self.policy = nn.Linear(1, 2)
        nn.init.zeros_(self.policy.weight)
        nn.init.zeros_(self.policy.bias)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.reference = rpc.RRef(self)
        infos = [rpc.get_worker_info(f"observer{i}") for i in range(1, NUM_OBSERVERS + 1)]
        self.observers = [rpc.remote(info, Observer) for info in infos]
        self.lock = threading.Lock()
        self.log_probs: list[Tensor] = []
        self.states = torch.zeros(NUM_OBSERVERS, 1)
        self.num_waiting = NUM_OBSERVERS
        self.actions: torch.futures.Future[Tensor] = torch.futures.Future()

    def choose(self, states: Tensor) -> Tensor:
        """An action for every state."""
        chances = torch.distributions.Categorical(logits=self.policy(states))
        actions = chances.sample()
        self.log_probs.append(chances.log_prob(actions) * (2.0 * actions - 1.0))
        return actions

    def select_action(self, observer_id: int, state: Tensor) -> int:
        """The action of one observer."""
        with self.lock:
            return int(self.choose(state).item())

    @staticmethod
    @rpc.functions.async_execution
    def select_in_a_batch(reference: Any, observer_id: int, state: Tensor) -> Any:
        """The action of one observer, once all have asked."""
        self = reference.local_value()
        with self.lock:
            action = self.actions.then(lambda done: int(done.wait()[observer_id - 1].item()))
            self.states[observer_id - 1] = state
            self.num_waiting -= 1
            if self.num_waiting == 0:
                self.num_waiting = NUM_OBSERVERS
                done, self.actions = self.actions, torch.futures.Future()
                done.set_result(self.choose(self.states.clone()))
            return action

    def run_episodes(self, in_batches: bool) -> float:
        """One walk of every observer, and a step of the optimizer; the mean reward of an action."""
        futures = [
            rpc.rpc_async(one.owner(), call_method, args=(Observer.run_episode, one, self.reference, in_batches))
            for one in self.observers
        ]
        rewards = torch.futures.wait_all(futures)
        self.optimizer.zero_grad()
        loss = -torch.cat([log_prob.flatten() for log_prob in self.log_probs]).mean()
        loss.backward()
        self.optimizer.step()
        self.log_probs.clear()
        return sum(rewards) / NUM_STEPS / NUM_OBSERVERS


def run(rank: int, port: int) -> None:
    """One process: the agent, or an observer that only answers."""
    torch.manual_seed(rank)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60)
    name = "agent" if rank == 0 else f"observer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=NUM_OBSERVERS + 1, rpc_backend_options=options)
    if rank == 0:
        agent = Agent()
        for in_batches in (False, True):
            rewards = [agent.run_episodes(in_batches) for _ in range(15)]
            print(f"in batches {in_batches}: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
    mp.spawn(run, args=(free_port,), nprocs=NUM_OBSERVERS + 1)
