"""Settings of secure aggregation, and how an update becomes integers that can be added exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torsh_distributed.errors import ConfigurationError, InvalidArgument

_MOST_WORD_BITS = 32
_REFUSED = {
    "homomorphic": "homomorphic encryption is not offered: its libraries give all clients one secret key: one client "
    "and the server together read every update, and a value takes 80 bytes and more",
    "multiparty": "multi-party computation is not offered: it needs several servers that do not work together, "
    "and a run has one",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SecureAggregation:
    """The server learns the sum of the round's updates and who is in it, but no single update.

    Both ends have these settings; a device refuses work with others.
    """

    value_range: float = 1.0
    """The largest magnitude of a value in an update. A client whose update has a larger one misses the round."""

    value_bits: int = 16
    """Bits of a value, whose grid has 2**value_bits steps. The sum's carries come on top: log2(clients · samples)."""

    most_samples: int = 1
    """A client counts as many times as it has samples, at most so often. 1: all clients count equally."""

    fewest: int = 3
    """The fewest updates in a sum; both ends refuse fewer. A sum of two tells each of them the other's update."""

    corrupt: float = 0.2
    """The share of a round's clients that may work together with the server without harm to the others."""

    lost: float = 0.2
    """The share of clients that may be lost where a round is so large that not everybody shares with everybody."""

    scheme: str = "masks"
    """How the sum is protected. Others are known by name, and refused with the reason."""

    def __post_init__(self) -> None:
        if not (self.value_range > 0 and math.isfinite(self.value_range)):
            raise ConfigurationError("value_range is a finite number above 0", value_range=self.value_range)
        if self.scheme != "masks":
            raise ConfigurationError(
                _REFUSED.get(self.scheme, "there is no scheme of this name"), hint="scheme='masks'", scheme=self.scheme
            )
        if not 2 <= self.value_bits <= 24:
            raise ConfigurationError("value_bits are 2 to 24, which a float32 can hold", value_bits=self.value_bits)
        if self.most_samples < 1:
            raise ConfigurationError("most_samples must be at least 1", most_samples=self.most_samples)
        if self.fewest < 3:
            raise ConfigurationError("a sum of fewer than 3 updates gives them away", fewest=self.fewest)
        if not (self.corrupt >= 0 and self.lost >= 0 and self.corrupt + self.lost < 1):
            raise ConfigurationError("corrupt and lost are shares, together below 1", got=repr(self))

    @property
    def _largest(self) -> int:
        """Of the grid's steps, to either side."""
        return int(2 ** (self.value_bits - 1) - 1)

    @property
    def grid(self) -> float:
        """The distance of two values: a power of two, so that values on the grid add up exactly as floats, too."""
        return float(2.0 ** math.ceil(math.log2(self.value_range / self._largest)))

    def word_bits(self, num_clients: int) -> int:
        """Of the words that so many clients send. ConfigurationError if their sum does not fit into 32."""
        bits = self.value_bits + math.ceil(math.log2(num_clients * self.most_samples))
        if bits > _MOST_WORD_BITS:
            raise ConfigurationError(
                f"the sum of {num_clients} clients needs {bits} bits, and {_MOST_WORD_BITS} are the most: "
                "value_bits + log2(clients · most_samples)",
                hint="lower value_bits or most_samples",
                value_bits=self.value_bits,
                most_samples=self.most_samples,
            )
        return bits

    def weight(self, num_samples: int) -> int:
        """How many times a client with so many samples counts."""
        return min(num_samples, self.most_samples)

    def on_grid(self, update: Tensor) -> Tensor:
        """The update with each value rounded to the grid; InvalidArgument if one is out of range."""
        steps = torch.round(update.to(torch.float64) / self.grid)
        # Not "above": NaN is not above anything.
        if not bool((steps.abs() <= self._largest).all()):
            # The message goes to the server, so the value is not in it.
            raise InvalidArgument(
                "the update has a value beyond secure_aggregation.value_range",
                hint="raise value_range at both ends, or train with a lower learning rate",
                largest=float(update.abs().max()),
                value_range=self.value_range,
            )
        return (steps * self.grid).to(update.dtype)

    def steps(self, update: Tensor) -> Tensor:
        """An update that is on the grid, as int64."""
        return torch.round(update.to(torch.float64) / self.grid).to(torch.int64)

    def largest_sum(self, weight: int) -> int:
        """What the sum of steps cannot exceed, for clients that count so often together."""
        return self._largest * weight
