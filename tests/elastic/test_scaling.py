"""How many workers are wanted, from the load: what the policies say, who asks, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from torsh_distributed.elastic.scaling import JobLoad, JobScaler, policy_named
from torsh_distributed.errors import InvalidArgument


def wanted(name: str, *loads: float, num_workers: int = 4) -> list[int | None]:
    """What a policy says to these loads, one after the other, in a world that does not change."""
    policy = policy_named(name)
    return [policy(JobLoad(num_workers=num_workers, load=load, num_steps=1)) for load in loads]


def test_aggressive_acts_at_once_and_jumps_to_the_number_that_fits() -> None:
    assert wanted("aggressive", 0.8, 0.3, 0.5) == [None, None, None]
    assert wanted("aggressive", 0.85, 2.2) == [7, 16]
    assert wanted("aggressive", 0.29, 0.0) == [3, 1]
    assert wanted("aggressive", 0.1, num_workers=1) == [1]


def test_conservative_waits_for_three_looks_in_a_row_and_goes_one_at_a_time() -> None:
    assert wanted("conservative", 0.85, 0.85, 0.85) == [None, None, None]
    assert wanted("conservative", 0.95, 0.95, 0.5, 0.95, 0.95, 5.0) == [None] * 5 + [5]
    assert wanted("conservative", 0.1, 0.1, 0.1, 0.1) == [None, None, 3, None]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no scaling policy 'eager'"):
        policy_named("eager")


@dataclass
class Job:
    """A worker that counts what is asked for."""

    is_leading: bool = True
    num_workers: int = 2
    num_steps: int = 10
    busy_s: float = 0.0
    asked: list[tuple[int, str]] = field(default_factory=list)

    def ask_for(self, num_workers: int, reason: str) -> None:
        """Note it."""
        self.asked.append((num_workers, reason))


def test_only_rank_0_asks_by_the_users_load_or_the_measured_one() -> None:
    seen: list[JobLoad] = []

    def policy(job: JobLoad) -> int:
        seen.append(job)
        return 5

    job = Job(is_leading=False)
    scaler = JobScaler(job, policy, load=lambda: 1.5)
    assert (scaler.look(), job.asked, seen) == (None, [], [])
    job.is_leading = True
    assert scaler.look() == 5
    assert job.asked == [(5, "load 1.50 with 2")]
    assert seen == [JobLoad(num_workers=2, load=1.5, num_steps=10)]
    measured = JobScaler(job, lambda load: None if load.load < 1 else 1)
    assert measured.look() is None  # it has done nothing
    job.busy_s += 1000.0
    assert measured.look() == 1
