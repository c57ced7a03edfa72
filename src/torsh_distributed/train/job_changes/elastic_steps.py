"""The interface between the Engine and what lets its steps outlive a lost rank.

The implementation is in `elastic`, above this package, and is loaded by name in elastic jobs alone: other jobs neither
import it nor pay for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from torsh_distributed import upward
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.strategy import PendingNumber
from torsh_distributed.plan import Plan

T = TypeVar("T")

SAME_SETTINGS_HINT = "start every rank from the same script and environment, with the same plan and arguments"
"""What to do if ranks were started with other values."""

_MEMBER_VARIABLE = "TORSH_MEMBER"


class ElasticSteps(Protocol):
    """Runs the steps of an Engine so that they complete although members of the world change."""

    @property
    def is_joining(self) -> bool:
        """Whether this worker was started later and has not entered the running world yet."""

    def step(self, batch: Any) -> float:
        """One update that is done exactly once, by whoever is in the world when it is done."""

    def protected(self, call: Callable[[], T]) -> T:
        """Run something that all ranks do together; again, in the new world, if one is lost meanwhile."""

    def mean_loss(self, loss: Tensor) -> PendingNumber:
        """As the strategy's; what the ranks have to agree on goes with it."""

    def join(self) -> None:
        """In a worker that was started later: enter the running world, before the first batch."""


def is_elastic_job() -> bool:
    """Whether this worker was started by `torsh run --elastic`."""
    return _MEMBER_VARIABLE in os.environ


def with_elastic(plan: Plan) -> Plan:
    """The plan as it is under this launcher: `torsh run --elastic` turns its section `elastic` on.

    Raises ConfigurationError if the plan asks for it and the launcher does not.
    """
    if is_elastic_job():
        return plan if plan.elastic.enabled else plan.replace(elastic={"enabled": True})
    if plan.elastic.enabled:
        raise ConfigurationError(
            "elastic.enabled needs a launcher that keeps the job together when a rank is lost",
            hint="start the job with `torsh run --elastic`, or leave the section out",
        )
    return plan


def elastic_steps_for(engine: Any) -> ElasticSteps | None:
    """What lets this Engine's steps outlive a lost rank; None where all are restarted instead.

    Any: the Engine is built on this interface.
    """
    if not is_elastic_job():
        return None
    return cast(ElasticSteps | None, upward.load(upward.ELASTIC_STEPS)(engine))
