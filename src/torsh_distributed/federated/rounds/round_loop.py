"""The server's side of training: choose clients, have them train, update the model, keep the state; round by round."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import CheckpointError, CommunicationError, ConfigurationError, InvalidArgument
from torsh_distributed.events import FederatedRoundEvent, emit
from torsh_distributed.federated.async_buffer import AsyncBuffer
from torsh_distributed.federated.client_selection import ClientFacts, PoissonSelection
from torsh_distributed.federated.federated_config import FederatedConfig
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.privacy.client_privacy import CentralNoise, CentralPrivacy, LocalPrivacy
from torsh_distributed.federated.random_seeds import derived_seed, seed_everything
from torsh_distributed.federated.rounds.round_file import RoundFile
from torsh_distributed.federated.rounds.round_order import Cohort, RoundOrder, RoundReplies, model_seed
from torsh_distributed.federated.update_sum import MeanUpdate
from torsh_distributed.federated.vector_codec import WHOLE, decoded, encoded

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
    epsilon: float | None = None
    """What the rounds so far have cost, with differential privacy."""


@dataclass(kw_only=True, slots=True)
class FederatedResult:
    """The trained model, and the rounds that led to it."""

    model: nn.Module
    rounds: list[RoundRecord]
    stopped: str | None = None
    """Why there are fewer rounds than asked for."""


class RoundLoop:
    """One run. With a directory it continues where an earlier process with the same directory ended."""

    def __init__(
        self, task: FederatedTask, config: FederatedConfig, cohort: Cohort, *, directory: Path | None = None
    ) -> None:
        self._task = task
        self._config = config
        self._cohort = cohort
        self._strategy = copy.deepcopy(config.strategy)  # a config may serve several runs; state is this run's
        self._noise = CentralNoise(config.privacy) if isinstance(config.privacy, CentralPrivacy) else None
        seed_everything(derived_seed(config.seed, "model"))
        self._global = ModelVector(task.model())
        self.vector: Tensor = self._global.read()
        """The global model's values."""
        self._weight = 0.0
        """Of the last round's updates together, where they were averaged."""
        if config.privacy is not None:
            _require_no_statistics(self._global.model)
        if self.vector.dtype != torch.float32 and {config.upload, config.download} != {WHOLE}:
            raise ConfigurationError("codecs are for models of float32", hint="leave upload and download at 'none'")
        self._records: list[RoundRecord] = []
        self._file = None if directory is None else RoundFile(directory).held()
        state = None if self._file is None else self._file.read()
        if state is not None:
            self._load(state)

    @property
    def next_round(self) -> int:
        """The number of the round that comes next, from 0."""
        return len(self._records)

    def run(self, on_round: Callable[[RoundRecord], None] | None = None) -> FederatedResult:
        """All rounds that are left. Raises CommunicationError if a round cannot get enough updates."""
        stopped = None
        while self.next_round < self._config.rounds:
            stopped = self._why_stop()
            if stopped is not None:
                break
            record = self.run_round()
            if on_round is not None:
                on_round(record)
        self._global.write(self.vector)
        return FederatedResult(model=self._global.model, rounds=list(self._records), stopped=stopped)

    def run_from(
        self, model: Tensor, epochs: int, num_rounds: int, on_round: Callable[[RoundRecord], None] | None = None
    ) -> tuple[RoundRecord, int]:
        """At least one round from another model than the last one's, for a tier above that sent it.

        Returns the last round, and what its updates weighed together. Afterwards `vector` is what they came to.
        """
        self.vector = model
        self._config = replace(self._config, local_epochs=epochs)
        for _ in range(num_rounds):
            if (stopped := self._why_stop()) is not None:
                raise InvalidArgument(stopped)
            record = self.run_round()
            if on_round is not None:
                on_round(record)
        return record, max(1, round(self._weight or record.num_updates))

    def run_round(self) -> RoundRecord:
        """The next round; on return its state is on the disk."""
        began_s = time.perf_counter()
        order, chosen, replies = self._updates_of_round()
        combined = self._combined(replies)
        self._weight = replies.total.weight
        num_trained = self._global.num_trained
        stepped = self._strategy.step(self.vector, combined, len(self._cohort.members()))
        # Buffers take the mean itself: momentum or Adam would make variances negative.
        self.vector = torch.cat([stepped[:num_trained], (self.vector + combined.delta)[num_trained:]])
        self._cohort.round_counts(order)
        record = RoundRecord(
            round=order.round,
            num_chosen=len(chosen),
            num_updates=replies.num_updates,
            num_attempts=order.attempt + 1,
            failures=_counted(replies.failures.values()),
            figures={**_client_figures(replies), **self._evaluate()},
            bytes_up=replies.bytes_up,
            bytes_down=replies.bytes_down,
            duration_s=time.perf_counter() - began_s,
            epsilon=self._epsilon(order.round + 1),
        )
        self._records.append(record)
        self._keep()
        planned = self._config.rounds or None
        emit(FederatedRoundEvent(**asdict(record), num_planned=planned, links=self._links_of(chosen)))
        return record

    def _links_of(self, chosen: Iterable[str]) -> dict[str, float]:
        rates = {facts.client: facts.bytes_per_s for facts in self._cohort.members()}
        return {client: rate for client in chosen if (rate := rates.get(client)) is not None}

    def _updates_of_round(self) -> tuple[RoundOrder, list[str], RoundReplies]:
        """The first attempt with enough updates."""
        config = self._config
        if config.buffer is not None:
            return self._buffered_updates(config.buffer)
        replies = RoundReplies()
        for attempt in range(config.max_attempts):
            order = self._order(attempt)
            chosen = self._choose(order)
            replies = self._cohort.train(order, chosen)
            # With central privacy a round without answers counts too: to repeat it would tell that there were none.
            if self._is_enough(replies) or self._noise is not None:
                return order, chosen, replies
        raise self._too_few(replies)

    def _is_enough(self, replies: RoundReplies) -> bool:
        """An odd update was one of the hostile ones that a rule reckons with: nobody can end a run by odd updates."""
        rule = self._config.rule
        num_known = 0 if rule is None else min(len(replies.refused), rule.hostile)
        return replies.num_updates + num_known >= self._config.min_clients

    def _buffered_updates(self, buffer: AsyncBuffer) -> tuple[RoundOrder, list[str], RoundReplies]:
        """As many as the buffer holds, from clients that began with this model or with earlier ones."""
        chosen: list[str] = []
        replies = RoundReplies()
        for attempt in range(self._config.max_attempts):
            order = self._order(attempt)
            asked: set[str] = set()
            self._cohort.clients()  # devices: waits until there are enough

            def hand_out(
                idle: list[ClientFacts], num_busy: int, order: RoundOrder = order, asked: set[str] = asked
            ) -> list[str]:
                num_free = self._config.clients_per_round - num_busy
                allowed = [facts for facts in idle if facts.client not in asked and self._may_be_asked(facts)]
                names = self._draw(allowed, max(0, num_free), order, turn=len(asked))
                asked.update(names)
                chosen.extend(names)
                return names

            replies.merge(self._cohort.collect(order, buffer.size - replies.num_updates, hand_out))
            if replies.num_updates >= buffer.size:
                return order, chosen, replies
        if replies.num_updates < self._config.min_clients:
            raise self._too_few(replies)
        return order, chosen, replies

    def _too_few(self, replies: RoundReplies) -> CommunicationError:
        return CommunicationError(
            f"round {self.next_round} got {replies.num_updates} updates in {self._config.max_attempts} attempts, "
            f"and needs {self._config.min_clients}: {_reasons(replies.failures)}",
            hint="the rounds before it are kept; look at the reasons, or lower min_clients",
            round=self.next_round,
        )

    def _order(self, attempt: int) -> RoundOrder:
        strategy, local, config = self._strategy, self._config.privacy, self._config
        packed, model = None, self.vector
        if config.download != WHOLE:
            seed, counts = model_seed(self.next_round), (self._global.num_parameters,) * 2
            packed = encoded(config.download, self.vector, seed, *counts)
            model = decoded(config.download, packed, self.vector, seed, *counts)
        return RoundOrder(
            round=self.next_round,
            attempt=attempt,
            model=model,
            num_trained=self._global.num_trained,
            num_parameters=self._global.num_parameters,
            packed_model=packed,
            download=config.download,
            upload=config.upload,
            error_feedback=config.error_feedback,
            epochs=self._config.local_epochs,
            seed=derived_seed(self._config.seed, "attempt", attempt),
            proximal=strategy.proximal,
            control=strategy.control(self.vector),
            wants_step_norm=strategy.needs_step_norm,
            local_clip=local.clip_norm if isinstance(local, LocalPrivacy) else None,
            local_noise_std=local.noise_std if isinstance(local, LocalPrivacy) else 0.0,
            central_clip=None if self._noise is None else self._noise.clip_norm,
            keeps_updates=self._config.rule is not None,
            secure=self._config.secure_aggregation,
            smaller=self._config.smaller_model,
        )

    def _choose(self, order: RoundOrder) -> list[str]:
        clients = self._askable()
        if not clients:
            raise InvalidArgument("there are no clients to train with", hint="start some, or wait for them")
        return self._draw(clients, self._config.clients_per_round, order)

    def _draw(self, clients: list[ClientFacts], count: int, order: RoundOrder, turn: int = 0) -> list[str]:
        """Choose, and count who was chosen. `turn`: how many got the same order before."""
        if not count:
            return []
        parts = (order.seed, order.round) if not turn else (order.seed, order.round, turn)
        chosen = self._config.selection.choose(clients, count, seed=derived_seed(*parts))
        asked = set(chosen)
        for facts in clients:
            if facts.client in asked:
                facts.num_chosen += 1
                facts.last_round = order.round
        return chosen

    def _askable(self) -> list[ClientFacts]:
        """Clients whose own budget is not spent."""
        return [facts for facts in self._cohort.clients() if self._may_be_asked(facts)]

    def _may_be_asked(self, facts: ClientFacts) -> bool:
        privacy = self._config.privacy
        return not isinstance(privacy, LocalPrivacy) or facts.num_chosen < privacy.most_rounds()

    def _combined(self, replies: RoundReplies) -> MeanUpdate:
        """The round's update, by the mean or what takes its place."""
        if self._config.rule is not None:
            updates = torch.stack([replies.kept[client] for client in sorted(replies.kept)])
            rule = self._config.rule.without(len(replies.refused))
            return MeanUpdate(delta=rule.combine(updates), num_updates=len(updates))
        if self._noise is None:
            return replies.total.mean(self._global.dtype)
        total = replies.total.total(self.vector)
        # Of all members: who is connected tells who took part.
        expected = self._probability * len(self._cohort.members())
        num_trained = self._global.num_trained
        trained = self._noise.private_mean(total[:num_trained], replies.num_unclipped, replies.num_updates, expected)
        delta = torch.cat([trained, torch.zeros_like(total[num_trained:])])
        return MeanUpdate(delta=delta.to(self._global.dtype), num_updates=replies.num_updates)

    @property
    def _probability(self) -> float:
        assert isinstance(self._config.selection, PoissonSelection), "the config requires it with central privacy"
        return self._config.selection.probability

    def _epsilon(self, num_rounds: int) -> float | None:
        privacy = self._config.privacy
        if isinstance(privacy, CentralPrivacy):
            return privacy.epsilon(num_rounds, self._probability)
        if isinstance(privacy, LocalPrivacy):
            return privacy.epsilon(max(facts.num_chosen for facts in self._cohort.members()))
        return None

    def _why_stop(self) -> str | None:
        """The reason if another round would go beyond the privacy budget."""
        privacy = self._config.privacy
        if isinstance(privacy, CentralPrivacy) and self.next_round >= privacy.most_rounds(self._probability):
            return f"another round would cost more than the budget of ε = {privacy.budget:g}"
        if isinstance(privacy, LocalPrivacy) and self._cohort.clients() and not self._askable():
            return f"every client has spent its budget of ε = {privacy.budget:g}"
        return None

    def _evaluate(self) -> dict[str, float]:
        self._global.write(self.vector)
        self._global.model.eval()
        return {name: float(value) for name, value in self._task.evaluate(self._global.model).items()}

    def _keep(self) -> None:
        if self._file is None:
            return
        self._file.write(
            {
                **self._identity(),
                "vector": self.vector,
                "strategy_state": self._strategy.state(),
                "noise": {} if self._noise is None else self._noise.state(),
                "cohort": dict(self._cohort.state()),
                "records": [asdict(record) for record in self._records],
            }
        )

    def _identity(self) -> dict[str, str]:
        """What a run must share with the one it continues: with other privacy, ε would not describe what was done."""
        return {
            "model": self._global.fingerprint,
            "strategy": self._strategy.name,
            "privacy": f"{self._config.privacy!r} by {self._config.selection.name}",
        }

    def _load(self, state: dict[str, Any]) -> None:
        for what, here in self._identity().items():
            if state[what] != here:
                raise CheckpointError(
                    f"the directory has the rounds of another {what}",
                    hint="continue with the same task and strategy, or begin in another directory",
                    kept=state[what],
                    now=here,
                )
        self.vector = state["vector"]
        self._strategy.load(state["strategy_state"])
        if self._noise is not None:
            self._noise.load(state["noise"])
        self._cohort.load(state["cohort"])
        self._records = [RoundRecord(**record) for record in state["records"]]


def _require_no_statistics(model: nn.Module) -> None:
    """Running statistics tell of single samples, and with noise a variance may be negative."""
    names = [name for name, module in model.named_modules() if getattr(module, "running_var", None) is not None]
    if names:
        raise ConfigurationError(
            "differential privacy covers trained parameters, and this model has running statistics besides",
            hint="use GroupNorm or LayerNorm, or track_running_stats=False",
            modules=names[:_MOST_REASONS],
        )


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for reason in reasons:
        found[reason] = found.get(reason, 0) + 1
    return found


def _client_figures(replies: RoundReplies) -> dict[str, float]:
    """Means over clients, weighted by samples."""
    means = {
        f"client_{name}": sum(weight * value for weight, value in pairs) / sum(weight for weight, _ in pairs)
        for name, pairs in replies.figures.items()
    }
    return {**means, "staleness": mean(replies.staleness)} if replies.staleness else means


def _reasons(failures: dict[str, str]) -> str:
    counted = sorted(_counted(failures.values()).items(), key=lambda pair: -pair[1])
    shown = "; ".join(f"{count} × {reason}" for reason, count in counted[:_MOST_REASONS])
    return shown or "no client was asked"
