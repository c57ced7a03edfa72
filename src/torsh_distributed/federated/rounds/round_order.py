"""What is asked of a round's clients, and what comes back; the same for virtual clients and for devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from torsh_distributed.errors import CompressionError
from torsh_distributed.federated.client_selection import ClientFacts
from torsh_distributed.federated.local_training import ClientUpdate, LocalWork
from torsh_distributed.federated.privacy.client_privacy import clipped
from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
from torsh_distributed.federated.random_seeds import derived_seed
from torsh_distributed.federated.smaller_model import SmallerModel
from torsh_distributed.federated.strategies.base import FederatedStrategy
from torsh_distributed.federated.update_sum import UpdateSum
from torsh_distributed.federated.vector_codec import WHOLE, decoded

_MOST_SAMPLES = 10**9
HandOut = Callable[[list[ClientFacts], int], list[str]]
"""Says who gets work now, from the idle clients and how many are busy; None of them twice with the same order."""


def model_seed(round: int) -> int:
    """Of the random numbers that the codec of a round's model draws."""
    return derived_seed(round, "model")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundOrder:
    """One attempt at a round."""

    round: int
    attempt: int
    model: Tensor
    num_trained: int
    """So many of the model's first values are of parameters that are trained."""
    num_parameters: int
    """So many are of parameters; buffers follow."""
    epochs: int
    seed: int
    proximal: float = 0.0
    control: Tensor | None = None
    wants_step_norm: bool = False
    local_clip: float | None = None
    local_noise_std: float = 0.0
    central_clip: float | None = None
    """The norm that the server clips updates to; clients then count equally."""
    keeps_updates: bool = False
    """Whether the server needs every update by itself, for a robust rule."""
    packed_model: Tensor | None = None
    """The message that `model` was decoded from, if it travels by a codec."""
    download: str = WHOLE
    upload: str = WHOLE
    """The codecs of the model and of updates."""
    error_feedback: bool = False
    scale: float = 1.0
    """What the server multiplies these updates with, for their staleness."""
    secure: SecureAggregation | None = None
    """The server gets the sum of the updates only."""
    smaller: SmallerModel | None = None
    """What clients train in place of the whole model."""

    def plain(self) -> dict[str, Any]:
        """Its fields, to send it; tensors are not copied."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        objects = {"secure": self.secure, "smaller": self.smaller}
        return {**plain, **{name: None if one is None else asdict(one) for name, one in objects.items()}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The order that `plain` made."""
        kinds = {"secure": SecureAggregation, "smaller": SmallerModel}
        objects = {name: None if plain[name] is None else kind(**plain[name]) for name, kind in kinds.items()}
        return cls(**{**plain, **objects})

    def message(self) -> dict[str, Any]:
        """What travels to a device: the model once, by its codec if it has one."""
        return {**self.plain(), "model": None} if self.packed_model is not None else self.plain()

    @classmethod
    def of_message(cls, message: dict[str, Any], like: Tensor) -> Self:
        """The order that `message` made; `like`: a vector of the model's size and dtype."""
        packed = message["packed_model"]
        if packed is not None:
            seed, num_parameters = model_seed(message["round"]), message["num_parameters"]
            model = decoded(message["download"], packed, like, seed, num_parameters, num_parameters)
            message = {**message, "model": model}
        return cls.from_plain(message)

    @property
    def num_bytes(self) -> int:
        """Of its vectors, as they travel."""
        model = self.model if self.packed_model is None else self.packed_model
        return model.nbytes + (0 if self.control is None else self.control.nbytes)

    @property
    def keeps_state(self) -> bool:
        """Whether clients remember something from round to round."""
        return self.control is not None or self.error_feedback

    def codec_seed(self, client: str) -> int:
        """Of the random numbers that the codec of a client's update draws."""
        return derived_seed(self.seed, self.round, client, "codec")

    def work_of(self, client: str, epochs: int | None = None) -> LocalWork:
        """A client's part of it."""
        return LocalWork(
            round=self.round,
            client=client,
            epochs=self.epochs if epochs is None else epochs,
            seed=derived_seed(self.seed, self.round, client),
            proximal=self.proximal,
            control=self.control,
            wants_step_norm=self.wants_step_norm,
            local_clip=self.local_clip,
            local_noise_std=self.local_noise_std,
            secure=self.secure,
            upload=self.upload,
            codec_seed=self.codec_seed(client),
            error_feedback=self.error_feedback,
            smaller=self.smaller,
        )


@dataclass(kw_only=True, slots=True)
class RoundReplies:
    """What came back from the clients of a round."""

    total: UpdateSum = field(default_factory=UpdateSum)
    kept: dict[str, Tensor] = field(default_factory=dict)
    """Client to its update, where a robust rule needs them."""
    num_unclipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """Client to why it does not count."""
    refused: set[str] = field(default_factory=set)
    """Those of them whose update arrived and was odd: of a hostile client, or one that is no better."""
    figures: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """What clients reported, each with its number of samples."""
    measured: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Of clients that count: samples, and steps per second; 0: none were measured."""
    staleness: list[int] = field(default_factory=list)
    """Of the updates that count, in buffered rounds."""
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def num_updates(self) -> int:
        """How many count."""
        return len(self.kept) or self.total.num_updates

    def merge(self, other: RoundReplies) -> None:
        """Add what other clients of the round replied."""
        self.total.merge(other.total)
        self.kept.update(other.kept)
        self.num_unclipped += other.num_unclipped
        self.failures.update(other.failures)
        self.refused |= other.refused
        for name, pairs in other.figures.items():
            self.figures.setdefault(name, []).extend((weight, value) for weight, value in pairs)
        self.measured.update(other.measured)
        self.staleness.extend(other.staleness)
        self.bytes_up += other.bytes_up
        self.bytes_down += other.bytes_down


class Cohort(Protocol):
    """The clients of a run, wherever they are."""

    def clients(self) -> list[ClientFacts]:
        """Those that can be asked now."""

    def members(self) -> list[ClientFacts]:
        """All that there are, also those that cannot be asked now. Never waits."""

    def train(self, order: RoundOrder, chosen: list[str]) -> RoundReplies:
        """Ask these clients; returns when all have answered, failed or are late."""

    def collect(self, order: RoundOrder, wanted: int, hand_out: HandOut) -> RoundReplies:
        """Keep clients at work, from now on with this order, until so many updates count or nobody is at work.

        Clients that are not done then go on; what they send counts for a later order.
        """

    def round_counts(self, order: RoundOrder) -> None:
        """The round is accepted: what its clients remember of it is valid."""

    def state(self) -> Mapping[str, object]:
        """What belongs into the round's file, as plain values and tensors."""

    def load(self, state: Mapping[str, object]) -> None:
        """Continue from `state`."""


class UpdateIntake:
    """Looks at each update by itself, and adds those that may count."""

    def __init__(self, strategy: FederatedStrategy, order: RoundOrder, max_norm: float | None) -> None:
        self._strategy = strategy
        self._order = order
        self._max_norm = max_norm
        self.replies = RoundReplies()

    def take_message(self, update: ClientUpdate, upload: str | None = None) -> bool:
        """Add an update whose delta is still as it travelled, by the order's codec or by `upload`; then as `take`."""
        order, method = self._order, upload or self._order.upload
        if method != WHOLE:
            try:
                seed, counts = order.codec_seed(update.client), (order.num_trained, order.num_parameters)
                update.delta = decoded(method, update.delta, order.model, seed, *counts)
            except CompressionError as error:
                return self._refuse(update.client, error.message)
        return self.take(update)

    def take(self, update: ClientUpdate) -> bool:
        """Add an update; whether it counts. If not, `replies.failures` says why."""
        problem = self._problem(update)
        if problem is not None:
            return self._refuse(update.client, problem)
        if self._order.keeps_updates:
            self.replies.kept[update.client] = update.delta
        elif self._order.central_clip is not None:
            vector, is_whole = clipped(update.delta, self._order.central_clip)
            self.replies.total.add(update, vector, 1.0)
            self.replies.num_unclipped += is_whole
        else:
            self.replies.total.add(update, self._averaged(update), self._strategy.weight(update))
        speed = update.num_steps / update.duration_s if update.duration_s > 0 else 0.0
        self.replies.measured[update.client] = update.num_samples, speed
        for name, value in update.figures.items():
            self.replies.figures.setdefault(name, []).append((update.num_samples, value))
        return True

    def _averaged(self, update: ClientUpdate) -> Tensor:
        """What of the update is averaged. Of running statistics only a mean is one again: theirs is the plain one."""
        vector, num_trained, scale = self._strategy.vector(update), self._order.num_trained, self._order.scale
        if vector is not update.delta and num_trained < vector.numel():
            vector = torch.cat([vector[:num_trained], update.delta[num_trained:]])
        return vector if scale == 1 else vector * scale

    def _refuse(self, client: str, reason: str) -> bool:
        self.replies.failures[client] = reason
        self.replies.refused.add(client)
        return False

    def _problem(self, update: ClientUpdate) -> str | None:
        if update.round != self._order.round:
            return f"it is an update of round {update.round}, and this is round {self._order.round}"
        wanted = {"control"} if self._order.control is not None else set()
        if set(update.extras) != wanted:
            return f"it has the vectors {sorted(update.extras)}, where the strategy averages {sorted(wanted)}"
        model = self._order.model
        for vector in (update.delta, *update.extras.values()):
            if vector.shape != model.shape or vector.dtype != model.dtype:
                return f"its vector has {vector.numel()} {vector.dtype}, the model {model.numel()} {model.dtype}"
            # The sum of finite values may overflow, and then all are looked at; of others it is never finite.
            if not math.isfinite(vector.sum().item()) and not bool(torch.isfinite(vector).all()):
                return "it has values that are not finite"
        order = self._order
        is_private = order.central_clip is not None or order.local_clip is not None
        if is_private and bool(update.delta[order.num_trained :].any()):
            return "its training changed buffers or frozen parameters, which get no noise: private updates have none"
        if not 1 <= update.num_samples <= _MOST_SAMPLES:
            return f"it claims {update.num_samples} samples"
        if self._order.wants_step_norm and not 0 < update.step_norm < math.inf:
            return "it has no step norm, by which the strategy compares clients"
        if self._max_norm is not None and (norm := float(update.delta.norm())) > self._max_norm:
            return f"it is {norm:.4g} long, and max_update_norm is {self._max_norm:g}"
        return None
