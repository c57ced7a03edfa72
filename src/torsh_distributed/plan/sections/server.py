"""Training through parameter servers: the `server` section of a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torsh_distributed.plan.section import Section, Words


class ServerConfig(Section):
    """Parameter servers in place of averaged gradients: ranks need not keep step. Results differ from one process."""

    training: Literal["none", "asynchronous", "elastic_averaging"] = "none"
    """Average gradients (none); push each rank's gradients to the servers, which do what the given optimizer would do;
    or let every rank train by itself, and move towards a centre now and then."""

    names: Words = ()
    """The servers, as `torsh ps serve` names them in the job's store. Left out: rank 0 serves."""

    staleness: int | None = Field(default=None, ge=0)
    """How many updates a rank may be ahead of the slowest under `asynchronous`. Left out: any number."""

    alpha: float | None = Field(default=None, gt=0)
    """Under `elastic_averaging`, the share of its distance to the centre that a rank moves. Left out: 0.9 / ranks."""

    period: int = Field(default=4, ge=1)
    """Under `elastic_averaging`, the steps between two moves."""

    waits: bool = True
    """Under `elastic_averaging`, whether all ranks move at the same step; otherwise each one when it is due."""

    push_codec: str | None = None
    """Codec of what ranks send, such as `int8` or `topk:0.01`. Left out: as it is."""

    pull_codec: str | None = None
    """Codec of what they receive: fp16, bf16, int8 or nbit:BITS. Left out: as it is."""
