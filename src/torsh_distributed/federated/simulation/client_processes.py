"""Processes that train virtual clients side by side. Each sums its clients' updates; one message a round comes back.

A worker's first message, the task itself, is pickled: it comes from its own parent, over a socket that has no name. All
others are plain values and tensors (`comm.serialization`). Processes of `multiprocessing` would leave two servers
behind for as long as the caller lives.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import ConfigurationError, ProcessFailure, SerializationError, TorshError
from torsh_distributed.federated.federated_config import FederatedConfig
from torsh_distributed.federated.federated_task import FederatedTask, load_task
from torsh_distributed.federated.rounds.round_order import RoundOrder, RoundReplies
from torsh_distributed.federated.simulation.virtual_clients import Availability, TrainedShare, VirtualClients
from torsh_distributed.federated.update_sum import UpdateSum

_END_S = 5.0


class ClientProcesses:
    """As many processes as asked for. A context manager: they end with it."""

    def __init__(
        self,
        task: FederatedTask | str,
        config: FederatedConfig,
        num_clients: int,
        availability: Availability,
        num_workers: int,
    ) -> None:
        """`task`: a task that can be pickled, or the path of the file that defines it."""
        num_threads = max(1, (os.cpu_count() or 1) // num_workers)
        beginning = _packed((task, config, num_clients, availability, num_threads))
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(num_workers):
                self._start()
            for pipe in self._pipes:
                self._send(pipe, [list(sys.path), beginning])
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._pipes.append(Connection(ours.detach()))
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))

    def train(
        self, order: RoundOrder, shares: Sequence[Sequence[str]], states: Mapping[str, Mapping[str, Tensor]]
    ) -> list[TrainedShare]:
        """Have each worker train its share of clients, all at the same time."""
        asked = []
        for pipe, clients in zip(self._pipes, shares, strict=True):
            if clients:
                own = {client: dict(states[client]) for client in clients if client in states}
                self._send(pipe, [order.plain(), list(clients), own])
                asked.append(pipe)
        answers: dict[Connection, TrainedShare] = {}
        while len(answers) < len(asked):
            for ready in wait([pipe for pipe in asked if pipe not in answers]):
                assert isinstance(ready, Connection), "nothing else is waited for"
                answers[ready] = self._receive(ready)
        return [answers[pipe] for pipe in asked]  # in the order of workers, not of arrival

    def _send(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send_bytes(serialize(message))
        except OSError as error:
            raise self._ended(pipe) from error

    def _receive(self, pipe: Connection) -> TrainedShare:
        try:
            answer = deserialize(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended(pipe) from error
        if "error" in answer:
            raise ConfigurationError(answer["error"], hint=answer["hint"])
        replies = RoundReplies(
            total=UpdateSum.from_state(answer["total"]),
            kept=answer["kept"],
            num_unclipped=answer["num_unclipped"],
            failures=answer["failures"],
            refused=set(answer["refused"]),
            figures=answer["figures"],
            measured={client: (samples, speed) for client, (samples, speed) in answer["measured"].items()},
        )
        replies.bytes_up, replies.bytes_down = answer["bytes_up"], answer["bytes_down"]
        return TrainedShare(replies=replies, states=answer["states"])

    def _ended(self, pipe: Connection) -> ProcessFailure:
        index = self._pipes.index(pipe)
        return ProcessFailure(
            f"worker {index} ended in the middle of a round",
            hint="its last lines are above; with --output the next run goes on with this round",
            exit_code=self._processes[index].wait(_END_S),
        )

    def close(self) -> None:
        """End all workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SerializationError(
            "the task cannot be sent to workers",
            hint="give the path of the file that defines it, or define its class at the top of a module",
            reason=str(error),
        ) from error


def _serve(pipe: Connection) -> None:
    """A worker: answers until its pipe is closed."""
    sys.path[:], beginning = deserialize(pipe.recv_bytes())
    task, config, num_clients, availability, num_threads = pickle.loads(beginning)  # noqa: S301  # from its parent
    torch.set_num_threads(num_threads)
    clients = VirtualClients(load_task(task) if isinstance(task, str) else task, config, num_clients, availability)
    while True:
        try:
            order, chosen, states = deserialize(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        pipe.send_bytes(serialize(_answer(clients, RoundOrder.from_plain(order), chosen, states)))


def _answer(
    clients: VirtualClients, order: RoundOrder, chosen: list[str], states: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    try:
        share = clients.train(order, chosen, states)
    except TorshError as error:
        return {"error": error.message, "hint": error.hint}
    return {
        "total": share.replies.total.state(),
        "kept": share.replies.kept,
        "num_unclipped": share.replies.num_unclipped,
        "failures": share.replies.failures,
        "refused": sorted(share.replies.refused),
        "figures": {name: [list(pair) for pair in pairs] for name, pairs in share.replies.figures.items()},
        "measured": {client: list(pair) for client, pair in share.replies.measured.items()},
        "bytes_up": share.replies.bytes_up,
        "bytes_down": share.replies.bytes_down,
        "states": share.states,
    }


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
