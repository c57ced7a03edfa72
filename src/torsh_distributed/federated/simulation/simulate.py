"""`simulate`: a federated run with virtual clients on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.client_selection import ClientFacts
from torsh_distributed.federated.federated_config import FederatedConfig, config_of
from torsh_distributed.federated.federated_task import FederatedTask, load_task
from torsh_distributed.federated.rounds.round_loop import FederatedResult, RoundLoop, RoundRecord
from torsh_distributed.federated.rounds.round_order import HandOut, RoundOrder, RoundReplies
from torsh_distributed.federated.simulation.client_processes import ClientProcesses
from torsh_distributed.federated.simulation.virtual_clients import Availability, TrainedShare, VirtualClients
from torsh_distributed.federated.simulation.virtual_clock import VirtualArrival, VirtualClock


def simulate(
    task: FederatedTask | str | Path,
    *,
    num_clients: int,
    config: FederatedConfig | None = None,
    num_workers: int = 1,
    availability: Availability | None = None,
    directory: str | Path | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
) -> FederatedResult:
    """Train with virtual clients; the result does not depend on `num_workers`.

    `task`: an instance, or the path of the file that defines it. With one worker all happens in this process. With a
    directory the state after each round is kept there, and a later call goes on with the next one.
    """
    if num_clients < 1 or num_workers < 1:
        raise InvalidArgument(
            "a simulation needs at least one client and one worker", num_clients=num_clients, num_workers=num_workers
        )
    source = str(task) if isinstance(task, str | Path) else task
    task = load_task(source) if isinstance(source, str) else source
    config = config or config_of(task)
    cohort = _SimulatedCohort(task, source, config, num_clients, num_workers, availability or Availability())
    with contextlib.closing(cohort):
        loop = RoundLoop(task, config, cohort, directory=None if directory is None else Path(directory))
        return loop.run(on_round)


class _SimulatedCohort:
    """Virtual clients for a round loop; see `Cohort`."""

    def __init__(
        self,
        task: FederatedTask,
        source: FederatedTask | str,
        config: FederatedConfig,
        num_clients: int,
        num_workers: int,
        availability: Availability,
    ) -> None:
        self._buffer = config.buffer
        self._availability = availability
        self._here = VirtualClients(task, config, num_clients, availability)
        self._sizes = self._here.sizes()
        self._num_workers = num_workers
        self._pool: ClientProcesses | None = None
        if num_workers > 1:
            self._pool = ClientProcesses(source, config, num_clients, availability, num_workers)
        self._facts = {
            str(index): ClientFacts(client=str(index), num_samples=size) for index, size in enumerate(self._sizes)
        }
        self._states: dict[str, dict[str, Tensor]] = {}
        self._pending: dict[str, dict[str, Tensor]] = {}
        self._clock = VirtualClock()
        self._orders: dict[tuple[int, int], RoundOrder] = {}
        """Those that clients are at work on, by round and attempt."""

    def clients(self) -> list[ClientFacts]:
        return list(self._facts.values())

    members = clients

    def train(self, order: RoundOrder, chosen: list[str]) -> RoundReplies:
        self._pending = {}
        return self._train(order, chosen)

    def _train(self, order: RoundOrder, chosen: list[str]) -> RoundReplies:
        replies = RoundReplies()
        for share in self._trained(order, chosen):
            replies.merge(share.replies)
            self._pending.update(share.states)
        for client, measured in replies.measured.items():
            self._facts[client].delivered(*measured)
        return replies

    def _trained(self, order: RoundOrder, chosen: list[str]) -> list[TrainedShare]:
        states = {**self._states, **self._pending}
        if self._pool is None:
            return [self._here.train(order, chosen, states)]
        return self._pool.train(order, self._shares(chosen), states)

    def collect(self, order: RoundOrder, wanted: int, hand_out: HandOut) -> RoundReplies:
        self._orders[order.round, order.attempt] = order
        replies = RoundReplies()
        while replies.num_updates < wanted:
            arrivals = self._arrivals(order, wanted - replies.num_updates, hand_out)
            if not arrivals:
                break
            for key in sorted({(arrival.round, arrival.attempt) for arrival in arrivals}):
                clients = [arrival.client for arrival in arrivals if arrival[3:] == key]
                replies.merge(self._train_late(self._orders[key], clients, order.round - key[0]))
        working = {(arrival.round, arrival.attempt) for arrival in self._clock.working}
        self._orders = {key: kept for key, kept in self._orders.items() if key in working}
        return replies

    def _arrivals(self, order: RoundOrder, wanted: int, hand_out: HandOut) -> list[VirtualArrival]:
        """The next clients to be done, until so many have an answer; each is replaced as it is done."""
        arrivals: list[VirtualArrival] = []
        while wanted:
            working = {arrival.client for arrival in self._clock.working}
            idle = [facts for facts in self._facts.values() if facts.client not in working]
            for client in hand_out(idle, len(working)):
                epochs = self._availability.epochs_of(order, client) or order.epochs
                takes_s = self._availability.duration_s(client, epochs * self._sizes[int(client)])
                self._clock.begin(client, round=order.round, attempt=order.attempt, takes_s=takes_s)
            if not self._clock.working:
                break
            arrivals.append(self._clock.next_arrival())
            wanted -= self._availability.epochs_of(self._orders[arrivals[-1][3:]], arrivals[-1].client) is not None
        return arrivals

    def _train_late(self, order: RoundOrder, clients: list[str], staleness: int) -> RoundReplies:
        """What clients came to that began so many steps of the model ago."""
        assert self._buffer is not None, "only buffered rounds collect"
        scale = self._buffer.scale(staleness)
        if not scale:
            return RoundReplies(failures=dict.fromkeys(clients, self._buffer.too_old(staleness)))
        replies = self._train(replace(order, scale=scale), clients)
        replies.staleness = [staleness] * replies.num_updates
        return replies

    def _shares(self, chosen: list[str]) -> list[list[str]]:
        """Clients by worker, the largest first to the worker with the fewest samples."""
        shares: list[list[str]] = [[] for _ in range(self._num_workers)]
        loads = [0] * self._num_workers
        for client in sorted(chosen, key=lambda one: -self._sizes[int(one)]):
            lightest = loads.index(min(loads))
            shares[lightest].append(client)
            loads[lightest] += self._sizes[int(client)] + 1
        return shares

    def round_counts(self, order: RoundOrder) -> None:
        self._states.update({client: state for client, state in self._pending.items() if state})
        self._pending = {}

    def state(self) -> Mapping[str, object]:
        return {
            "states": self._states,
            "facts": [asdict(facts) for facts in self._facts.values()],
            "clock": self._clock.state(),
            "orders": [order.plain() for order in self._orders.values()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        kept = [ClientFacts(**facts) for facts in state["facts"]]
        if [facts.client for facts in kept] != list(self._facts):
            raise InvalidArgument(
                "the directory has a run with another number of clients",
                hint="continue with the same --clients, or begin in another directory",
                kept=len(kept),
                now=len(self._facts),
            )
        self._facts = {facts.client: facts for facts in kept}
        self._states = state["states"]
        self._clock = VirtualClock(*state["clock"])
        self._orders = {(order["round"], order["attempt"]): RoundOrder.from_plain(order) for order in state["orders"]}

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()
