"""Copies of the parameters for followers: no push writes to them, and they outlive the process as everything else."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from torsh_distributed.rpc.parameters.kept_tensors import KeptTensors

_NUM_KEPT = 2
"""A follower of several servers may still read the one before the newest."""


class Publications:
    """Those of one server, and who waits for the next. One thread at a time."""

    def __init__(self, kept: KeptTensors) -> None:
        self._kept = kept
        self._waiting: list[tuple[int, Future[dict[str, Any]]]] = []

    @property
    def newest(self) -> int:
        """Its number; 0 if there is none."""
        return max(self._versions(), default=0)

    def _versions(self) -> dict[int, int]:
        """Of the parameters, by publication."""
        return {int(number): int(version) for number, version in self._kept.values.get("published", {}).items()}

    def add(self, number: int, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy the parameters. New memory each time: who reads an older publication goes on reading it."""
        versions = {**self._versions(), number: version}
        with self._kept.changing([]):
            for name, tensor in tensors.items():
                self._kept.add(f"f/{number}/{name}", tensor.shape, tensor.dtype).copy_(tensor)
            for old in sorted(versions)[:-_NUM_KEPT]:
                del versions[old]
                for name in self._kept.names(f"f/{old}/"):
                    self._kept.drop(name)
            self._kept.commit(published={str(one): at for one, at in versions.items()})

    def wait(self, after: int) -> Future[dict[str, Any]]:
        """For the first one after this number."""
        answer: Future[dict[str, Any]] = Future()
        self._waiting.append((after, answer))
        return answer

    def due(self) -> list[tuple[Future[Any], Any]]:
        """Who need not wait any more, with what it gets."""
        versions = self._versions()
        waiting, self._waiting = self._waiting, []
        found: list[tuple[Future[Any], Any]] = []
        for after, answer in waiting:
            number = min((one for one in versions if one > after), default=None)
            if number is None:
                self._waiting.append((after, answer))
                continue
            prefix = f"f/{number}/"
            tensors = {name[len(prefix) :]: self._kept[name] for name in self._kept.names(prefix)}
            found.append((answer, {"publication": number, "version": versions[number], "tensors": tensors}))
        return found
