"""The server's side of training: choose clients, have them train, update the model, keep the state; round by round."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torsh_distributed.errors import CheckpointError, CommunicationError, InvalidArgument
from torsh_distributed.events import FederatedRoundEvent, emit
from torsh_distributed.federated.federated_config import FederatedConfig
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.random_seeds import derived_seed, seed_everything
from torsh_distributed.federated.rounds.round_file import RoundFile
from torsh_distributed.federated.rounds.round_order import Cohort, RoundOrder, RoundReplies

_MOST_REASONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRecord:
    """What happened in a round that counts."""

    round: int
    num_chosen: int
    num_updates: int
    num_attempts: int
    failures: dict[str, int] = field(default_factory=dict)
    """Why clients did not count, to how many."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of the global model, and of clients' training as `client_…`, weighted by samples."""
    bytes_up: int = 0
    bytes_down: int = 0
    duration_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class FederatedResult:
    """The trained model, and the rounds that led to it."""

    model: nn.Module
    rounds: list[RoundRecord]


class RoundLoop:
    """One run. With a directory it continues where an earlier process with the same directory ended."""

    def __init__(
        self, task: FederatedTask, config: FederatedConfig, cohort: Cohort, *, directory: Path | None = None
    ) -> None:
        self._task = task
        self._config = config
        self._cohort = cohort
        self._strategy = copy.deepcopy(config.strategy)  # a config may serve several runs; state is this run's
        seed_everything(derived_seed(config.seed, "model"))
        self._global = ModelVector(task.model())
        self._vector: Tensor = self._global.read()
        self._records: list[RoundRecord] = []
        self._file = None if directory is None else RoundFile(directory)
        state = None if self._file is None else self._file.read()
        if state is not None:
            self._load(state)

    @property
    def next_round(self) -> int:
        """The number of the round that comes next, from 0."""
        return len(self._records)

    def run(self, on_round: Callable[[RoundRecord], None] | None = None) -> FederatedResult:
        """All rounds that are left. Raises CommunicationError if a round cannot get enough updates."""
        while self.next_round < self._config.rounds:
            record = self.run_round()
            if on_round is not None:
                on_round(record)
        self._global.write(self._vector)
        return FederatedResult(model=self._global.model, rounds=list(self._records))

    def run_round(self) -> RoundRecord:
        """The next round; on return its state is on the disk."""
        began_s = time.perf_counter()
        order, chosen, replies = self._updates_of_round()
        mean = replies.total.mean(self._global.dtype)
        self._vector = self._strategy.step(self._vector, mean, len(self._cohort.clients()))
        self._cohort.round_counts(order)
        record = RoundRecord(
            round=order.round,
            num_chosen=len(chosen),
            num_updates=mean.num_updates,
            num_attempts=order.attempt + 1,
            failures=_counted(replies.failures.values()),
            figures={**_client_figures(replies), **self._evaluate()},
            bytes_up=replies.bytes_up,
            bytes_down=replies.bytes_down,
            duration_s=time.perf_counter() - began_s,
        )
        self._records.append(record)
        self._keep()
        emit(FederatedRoundEvent(**asdict(record)))
        return record

    def _updates_of_round(self) -> tuple[RoundOrder, list[str], RoundReplies]:
        """The first attempt with enough updates."""
        config = self._config
        replies = RoundReplies()
        for attempt in range(config.max_attempts):
            order = self._order(attempt)
            chosen = self._choose(order)
            replies = self._cohort.train(order, chosen)
            if replies.total.num_updates >= config.min_clients:
                return order, chosen, replies
        raise CommunicationError(
            f"round {self.next_round} got {replies.total.num_updates} updates in {config.max_attempts} attempts, "
            f"and needs {config.min_clients}: {_reasons(replies.failures)}",
            hint="the rounds before it are kept; look at the reasons, or lower min_clients",
            round=self.next_round,
        )

    def _order(self, attempt: int) -> RoundOrder:
        strategy = self._strategy
        return RoundOrder(
            round=self.next_round,
            attempt=attempt,
            model=self._vector,
            epochs=self._config.local_epochs,
            seed=derived_seed(self._config.seed, "attempt", attempt),
            proximal=strategy.proximal,
            control=strategy.control(self._vector),
            wants_step_norm=strategy.needs_step_norm,
        )

    def _choose(self, order: RoundOrder) -> list[str]:
        clients = self._cohort.clients()
        if not clients:
            raise InvalidArgument("there are no clients to train with", hint="start some, or wait for them")
        seed = derived_seed(order.seed, order.round)
        chosen = self._config.selection.choose(clients, self._config.clients_per_round, seed=seed)
        asked = set(chosen)
        for facts in clients:
            if facts.client in asked:
                facts.num_chosen += 1
                facts.last_round = order.round
        return chosen

    def _evaluate(self) -> dict[str, float]:
        self._global.write(self._vector)
        self._global.model.eval()
        return {name: float(value) for name, value in self._task.evaluate(self._global.model).items()}

    def _keep(self) -> None:
        if self._file is None:
            return
        self._file.write(
            {
                "fingerprint": self._global.fingerprint,
                "strategy": self._strategy.name,
                "model": self._vector,
                "strategy_state": self._strategy.state(),
                "cohort": dict(self._cohort.state()),
                "records": [asdict(record) for record in self._records],
            }
        )

    def _load(self, state: dict[str, Any]) -> None:
        for what, here in (("fingerprint", self._global.fingerprint), ("strategy", self._strategy.name)):
            if state[what] != here:
                raise CheckpointError(
                    f"the directory has the rounds of another {'model' if what == 'fingerprint' else what}",
                    hint="continue with the same task and strategy, or begin in another directory",
                    kept=state[what],
                    now=here,
                )
        self._vector = state["model"]
        self._strategy.load(state["strategy_state"])
        self._cohort.load(state["cohort"])
        self._records = [RoundRecord(**record) for record in state["records"]]


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason in reasons:
        found[reason] = found.get(reason, 0) + 1
    return found


def _client_figures(replies: RoundReplies) -> dict[str, float]:
    """Means over clients, weighted by samples."""
    return {
        f"client_{name}": sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)
        for name, pairs in replies.figures.items()
    }


def _reasons(failures: dict[str, str]) -> str:
    counted = sorted(_counted(failures.values()).items(), key=lambda pair: -pair[1])
    shown = "; ".join(f"{count} × {reason}" for reason, count in counted[:_MOST_REASONS])
    return shown or "no client was asked"
