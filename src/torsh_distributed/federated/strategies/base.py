"""What a strategy decides: what clients add to their training, how updates are weighted, and the server's step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated.local_training import ClientUpdate
from torsh_distributed.federated.update_sum import MeanUpdate


class FederatedStrategy(ABC):
    """x: the global model as a vector. Objects are settings and, after the first round, state."""

    name: ClassVar[str]
    proximal: float = 0.0
    """mu of the proximal term that clients add."""
    needs_step_norm: ClassVar[bool] = False
    takes_any_mean: ClassVar[bool] = True
    """Whether a robust rule or a private sum may replace the mean: not where more than the update is averaged."""

    def control(self, model: Tensor) -> Tensor | None:
        """The control variate that clients get with the model."""
        return None

    def weight(self, update: ClientUpdate) -> float:
        """Of an update in the mean: its number of samples."""
        return float(update.num_samples)

    def vector(self, update: ClientUpdate) -> Tensor:
        """What of the update is averaged."""
        return update.delta

    @abstractmethod
    def step(self, model: Tensor, mean: MeanUpdate, num_clients: int) -> Tensor:
        """The next global model. `num_clients`: all there are, not only those of the round."""

    def state(self) -> dict[str, Any]:
        """What the next round needs, as plain values and tensors."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        assert not state, "a strategy with state has its own"


def require_positive(name: str, **values: Any) -> None:
    """Raise ConfigurationError for a setting of a strategy that is not above 0."""
    for key, value in values.items():
        if not value > 0:
            raise ConfigurationError(f"{name}: {key} must be above 0", **{key: value})


def require_share(name: str, **values: Any) -> None:
    """Raise ConfigurationError for a setting of a strategy that is not in [0, 1)."""
    for key, value in values.items():
        if not 0 <= value < 1:
            raise ConfigurationError(f"{name}: {key} must be at least 0 and below 1", **{key: value})
