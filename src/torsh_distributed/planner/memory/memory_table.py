"""The memory of a rank as named terms, and the table of all pipeline ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9
"""As device memory is sold: 80 GB are 80 × 10**9 bytes, or a little more."""

TERMS: Mapping[str, str] = {
    "parameters": "as this rank keeps them between steps",
    "gradients": "of the trained parameters that it keeps",
    "optimizer state": "of the shards or parameters that it updates",
    "optimizer temporaries": "during the update",
    "gathered parameters": "pieces that are whole while they compute, prefetched ones, the copy they arrive in",
    "whole gradients": "of gathered pieces, before they are summed into shards",
    "sent gradients": "the copy in which gradients travel",
    "copies of weights": "in the format of computation",
    "activations": "kept from forward to backward, of all microbatches in flight",
    "computing": "the largest moment of a block, or of head and loss",
    "stage buffers": "what pipeline stages send and receive, for every microbatch",
    "buffers": "of the model",
    "offload window": "parameters, gradients and state on the device for the moment",
}
"""Term to what it is."""


@dataclass(frozen=True)
class RankMemory:
    """What one pipeline rank holds at its peak: an estimate."""

    rank: int
    """Along pp; ranks of other axes hold as much."""
    what: str
    """Its part of the model."""
    moment: str
    """When the peak is: in forward, in backward, in the update."""
    terms: Mapping[str, float]
    """Bytes by term; those that are not there are 0."""

    @property
    def total_bytes(self) -> float:
        """The peak."""
        return sum(self.terms.values())


@dataclass(frozen=True)
class MemoryTable:
    """The estimated peaks of all pipeline ranks."""

    ranks: tuple[RankMemory, ...]
    num_samples: int
    """Of a microbatch on a rank."""

    @property
    def peak(self) -> RankMemory:
        """The rank that needs the most."""
        return max(self.ranks, key=lambda one: one.total_bytes)

    @property
    def peak_bytes(self) -> float:
        """What the rank that needs the most needs."""
        return self.peak.total_bytes
