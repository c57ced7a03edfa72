"""Random transforms in loader workers as a function of seed, epoch and sample alone.

A worker's generators depend on how many samples it has made before, so a run that resumes in mid-epoch would transform
the rest differently.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from typing_extensions import override


class SeededSamples(Dataset[Any]):
    """A map-style dataset whose every sample is made with generators seeded for it. For loader workers."""

    def __init__(self, data: Dataset[Any], *, seed: int, epoch: int) -> None:
        self._data = data
        self._seed = seed
        self._epoch = epoch

    @override
    def __getitem__(self, index: int) -> Any:
        mixed = ((self._seed * 1_000_003 + self._epoch) * 1_000_003 + int(index)) % 2**63
        torch.manual_seed(mixed)
        random.seed(mixed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(mixed % 2**32)
        return self._data[index]

    def __getattr__(self, name: str) -> Any:
        # What worker_init_fn and the like look for is on the user's dataset.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_data"], name)
