"""How ranks communicate: the `distributed` section of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.describing import AllowedValues
from torsh_distributed.plan.problems import Problem, did_you_mean
from torsh_distributed.plan.section import Section, Words

BACKENDS = ("gloo", "nccl", "torsh", "shm", "mpi4py", "ucc", "fake")
IN_RANK_ORDER = ("backend", "auto", "reduce_scatter_all_gather", "pipelined")
"""Algorithms that `deterministic` allows; `backend` then means the one that always works."""
_ALLOWED = AllowedValues(
    f"auto, {', '.join(BACKENDS)}, one per device such as cpu:gloo,cuda:nccl, or a name that backend_module registers"
)


class DistributedConfig(Section):
    """The backend and its timeout. Addresses, ranks and world size belong to the launcher, not to a plan."""

    backend: Annotated[str, _ALLOWED] = "auto"
    """The library that moves the bytes. `auto` picks nccl if ranks have a GPU, else the best CPU backend."""

    backend_module: str = Field(default="", pattern=r"^(|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)$")
    """A module of another package that registers its backend with torch when it is imported. `init()` imports it, and
    `backend` and `fallback` may name what it registers."""

    fallback: Words = ()
    """Backends to take, in this order, if `backend` cannot be used on every rank. All ranks take the same one, with a
    warning and an event. Left out: there is no other, and what is missing is an error."""

    timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of the rendezvous and of every collective. Raise it if ranks work long between collectives."""

    algorithm: Literal[
        "backend",
        "auto",
        "ring",
        "tree",
        "doubling",
        "hierarchical",
        "reduce_scatter_all_gather",
        "pipelined",
        "double_buffered",
    ] = "backend"
    """How gradients are summed: as the backend does it, as measured fastest at the first step, or by one algorithm. All
    but `backend` and `auto` need gradients on the CPU."""

    deterministic: bool = False
    """Add gradients in the order of ranks: the same ranks with the same data get the same bits on every backend, in
    every layout and every run. Gives up the backend's shortcuts; needs gradients on the CPU."""

    rate_limit_gbps: float | None = Field(default=None, gt=0)
    """Limit for the gradients that a rank sends, in 10**9 bits per second, to leave room for others on a shared link.
    Left out: no limit. Needs gradients on the CPU."""

    @override
    def find_problems(self) -> Iterator[Problem]:
        if self.deterministic and self.algorithm not in IN_RANK_ORDER:
            yield Problem(
                "algorithm",
                f"distributed.algorithm {self.algorithm!r} does not add in the order of ranks, as"
                " distributed.deterministic requires",
                f"use one of: {', '.join(IN_RANK_ORDER)}",
            )
        yield from self._name_problems("backend", self.backend)
        for name in self.fallback:
            yield from self._name_problems("fallback", name)

    def _name_problems(self, key: str, backend: str) -> Iterator[Problem]:
        for part in backend.split(",") if backend != "auto" else ():
            device, _, name = part.rpartition(":")
            is_known = name in BACKENDS or (self.backend_module and name.isidentifier())
            if not is_known or (":" in part and device not in ("cpu", "cuda") and not self.backend_module):
                yield Problem(
                    key,
                    f"distributed.{key} must be {_ALLOWED.text}; got {backend!r}",
                    did_you_mean(name, ("auto", *BACKENDS)) if name not in BACKENDS else "",
                )
                return
