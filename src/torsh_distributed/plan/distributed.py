"""How the ranks talk: the `distributed` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.allowed import Allowed
from torsh_distributed.plan.base import Section
from torsh_distributed.plan.problems import Problem, did_you_mean

BACKENDS = ("gloo", "nccl", "torsh", "shm", "mpi4py", "ucc", "fake")
_ALLOWED = Allowed(f"auto, {', '.join(BACKENDS)}, or one per device such as cpu:gloo,cuda:nccl")


class DistributedConfig(Section):
    """The backend and its deadline. Addresses, ranks and world size belong to the launcher, not to a plan."""

    backend: Annotated[str, _ALLOWED] = "auto"
    """The library that moves the bytes. `auto` takes nccl where ranks have a GPU and the best CPU backend otherwise."""

    timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of the rendezvous and of every collective. Raise it if ranks do long work between collectives."""

    algorithm: Literal["backend", "auto", "ring", "tree", "hierarchical"] = "backend"
    """How an all-reduce travels: as the backend likes, by measurement, or always in one way."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.backend == "auto":
            return
        for part in self.backend.split(","):
            device, _, name = part.rpartition(":")
            if name not in BACKENDS or (":" in part and device not in ("cpu", "cuda")):
                yield Problem(
                    "backend",
                    f"backend must be {_ALLOWED.text}; got {self.backend!r}",
                    did_you_mean(name, ("auto", *BACKENDS)) if name not in BACKENDS else "",
                )
                return
