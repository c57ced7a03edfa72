"""How a federated run goes: how many rounds, with whom, by which strategy."""

from __future__ import annotations

from dataclasses import dataclass, field

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated.async_buffer import AsyncBuffer
from torsh_distributed.federated.client_selection import (
    AdaptiveSelection,
    ClientSelection,
    ComputeSelection,
    DataSelection,
    PoissonSelection,
    RandomSelection,
)
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.privacy.client_privacy import CentralPrivacy, LocalPrivacy
from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
from torsh_distributed.federated.robust.base import RobustRule
from torsh_distributed.federated.smaller_model import SmallerModel
from torsh_distributed.federated.strategies.averaging import FedAvg
from torsh_distributed.federated.strategies.base import FederatedStrategy
from torsh_distributed.federated.vector_codec import WHOLE, require_download_method, require_upload_method

_NOISE_REACH = 8
"""Standard deviations: one value in 10**15 goes beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FederatedConfig:
    """Settings of a run, the same for a simulation and for devices."""

    rounds: int = 10
    """How often the global model is updated."""

    clients_per_round: int = 10
    """How many clients are asked in a round. More make the mean steadier, and the round longer."""

    min_clients: int = 1
    """The fewest updates that make a round. With fewer it is tried again, with other clients."""

    max_attempts: int = 3
    """How often a round is tried before the run ends with the reasons."""

    local_epochs: int = 1
    """What `train` gets as `epochs`. More means fewer rounds, and clients that drift apart on data that differ."""

    partial_work: bool = True
    """Whether a client that did fewer epochs counts. False drops it, as FedAvg was published."""

    max_update_norm: float | None = None
    """The longest update (Euclidean) that is accepted; None: any finite one."""

    strategy: FederatedStrategy = field(default_factory=FedAvg)
    """What the server does with the updates."""

    selection: ClientSelection = field(default_factory=RandomSelection)
    """Who is asked."""

    rule: RobustRule | None = None
    """What takes the place of the mean against hostile clients."""

    privacy: CentralPrivacy | LocalPrivacy | None = None
    """Differential privacy of whole clients."""

    upload: str = "none"
    """The codec of updates, as in a plan: `int8`, `topk:0.01`. Fewer bytes, and an update that is only near."""

    download: str = "none"
    """The codec of the model: fp16, bf16, int8, nbit or natural. Clients begin with what they decode."""

    error_feedback: bool = False
    """Whether a client adds what its codec left out to its next update. It keeps a vector for that."""

    buffer: AsyncBuffer | None = None
    """Rounds that wait for nobody: each step of the model takes the updates that are there."""

    secure_aggregation: SecureAggregation | None = None
    """The server learns the sum of a round's updates and none of them. Devices must have the same settings."""

    smaller_model: SmallerModel | None = None
    """What clients train in place of the whole model: pruned, with fewer bits, or both."""

    seed: int = 0
    """Of the model's first values, of the choice of clients, and of their training."""

    def __post_init__(self) -> None:
        for name in ("clients_per_round", "min_clients", "max_attempts", "local_epochs"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be at least 1", **{name: getattr(self, name)})
        if self.rounds < 0:
            raise ConfigurationError("rounds must not be negative", rounds=self.rounds)
        if self.min_clients > self.clients_per_round:
            raise ConfigurationError(
                "a round can never have min_clients updates if fewer clients are asked",
                hint="raise clients_per_round or lower min_clients",
                min_clients=self.min_clients,
                clients_per_round=self.clients_per_round,
            )
        if self.rule is not None:
            self.rule.require(self.min_clients)
        self._require_any_mean()
        self._require_bufferable()
        if self.smaller_model is not None and not self.strategy.takes_any_mean:
            raise ConfigurationError(
                f"{self.strategy.name} describes steps of the whole model, and smaller_model changes them",
                hint="choose fedavg, fedprox or one of the adaptive strategies",
            )
        require_upload_method(self.upload)
        require_download_method(self.download)
        if self.error_feedback and self.upload == WHOLE:
            raise ConfigurationError("error_feedback has no effect without a codec", hint='such as upload="topk:0.01"')
        if isinstance(self.privacy, CentralPrivacy) != isinstance(self.selection, PoissonSelection):
            raise ConfigurationError(
                "central privacy and PoissonSelection belong together: its account describes that sampling",
                hint="selection=PoissonSelection(probability), with privacy=CentralPrivacy(...)",
                selection=self.selection.name,
            )
        if self.secure_aggregation is not None:
            self._require_only_a_sum(self.secure_aggregation)
        if self.max_update_norm is not None and not self.max_update_norm > 0:
            raise ConfigurationError("max_update_norm must be above 0", max_update_norm=self.max_update_norm)

    def _require_only_a_sum(self, secure: SecureAggregation) -> None:
        """Refuse what a server cannot do that sees no single update."""
        reasons = {
            "a robust rule looks at single updates": self.rule is not None,
            "central privacy clips and counts single updates": isinstance(self.privacy, CentralPrivacy),
            f"{self.strategy.name} averages more than updates": not self.strategy.takes_any_mean,
            "a buffer weights single updates by their age": self.buffer is not None,
            "max_update_norm is the length of single updates": self.max_update_norm is not None,
            "upload is a codec of single updates": self.upload != WHOLE,
            f"selection {self.selection.name!r} goes by what single clients report": isinstance(
                self.selection, AdaptiveSelection | ComputeSelection | DataSelection
            ),
        }
        for reason, is_so in reasons.items():
            if is_so:
                raise ConfigurationError(
                    f"{reason}, which secure aggregation hides from the server",
                    hint="leave one of the two out; LocalPrivacy goes with secure aggregation",
                )
        secure.word_bits(self.clients_per_round)
        if self.min_clients < secure.fewest:
            raise ConfigurationError(
                "with secure aggregation min_clients must be at least secure_aggregation.fewest",
                min_clients=self.min_clients,
                fewest=secure.fewest,
            )
        if isinstance(self.privacy, LocalPrivacy):
            needed = self.privacy.clip_norm + _NOISE_REACH * self.privacy.noise_std
            if secure.value_range < needed:
                raise ConfigurationError(
                    f"with this local privacy values go up to {needed:.4g}: clip_norm, {_NOISE_REACH} times the noise",
                    hint="raise secure_aggregation.value_range to that",
                    value_range=secure.value_range,
                )

    def _require_any_mean(self) -> None:
        """Refuse what asks for two different sums of the same updates."""
        if isinstance(self.privacy, CentralPrivacy) and self.rule is not None:
            raise ConfigurationError(
                "a robust rule and central privacy exclude each other: the noise is that of a sum",
                hint="clipping bounds what one client can do; or use LocalPrivacy with the rule",
            )
        if (self.rule is not None or self.privacy is not None) and not self.strategy.takes_any_mean:
            raise ConfigurationError(
                f"{self.strategy.name} averages more than updates, which robust rules and privacy do not cover",
                hint="choose fedavg, fedprox or one of the adaptive strategies",
                strategy=self.strategy.name,
            )

    def _require_bufferable(self) -> None:
        """Refuse what needs all updates of a step to have begun with the same model."""
        if self.buffer is None:
            return
        if self.min_clients > self.buffer.size:
            raise ConfigurationError(
                "a step can never have min_clients updates if the buffer is smaller",
                min_clients=self.min_clients,
                buffer_size=self.buffer.size,
            )
        what = "a robust rule" if self.rule is not None else None
        what = "central privacy" if isinstance(self.privacy, CentralPrivacy) else what
        what = what if self.strategy.takes_any_mean else f"strategy {self.strategy.name!r}"
        if what is not None:
            raise ConfigurationError(
                f"{what} needs updates that began with the same model, which those of a buffer did not",
                hint="leave buffer out, or choose fedavg, fedprox, fedavgm, fedmom or an adaptive strategy",
            )


def config_of(task: FederatedTask) -> FederatedConfig:
    """The task's own settings, or the defaults."""
    config = FederatedConfig() if task.config is None else task.config
    if not isinstance(config, FederatedConfig):
        raise ConfigurationError(
            f"the config of {type(task).__name__} must be a FederatedConfig", got=type(config).__name__
        )
    return config
