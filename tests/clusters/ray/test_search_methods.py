from __future__ import annotations

import pytest

from torsh_distributed.clusters.ray.search_methods import SearchMethod, choose_method
from torsh_distributed.errors import InvalidArgument


def test_a_searcher_and_a_scheduler_stay_what_they_are() -> None:
    assert choose_method("random", "asha") == SearchMethod("random", "asha")
    assert choose_method("BASIC_VARIANT", "MEDIAN_STOPPING") == SearchMethod("random", "median_stopping")


@pytest.mark.parametrize("name", ["hyperband", "POPULATION_BASED_TRAINING"])
def test_a_scheduler_given_as_searcher_is_moved_with_a_notice(name: str) -> None:
    method = choose_method(name, "fifo")
    assert method.searcher == "random"
    assert method.scheduler in ("hyperband", "pbt")
    assert "is a scheduler" in method.notices[0]


def test_bohb_gets_the_scheduler_that_it_needs() -> None:
    method = choose_method("bohb", "fifo")
    assert (method.searcher, method.scheduler) == ("bohb", "bohb_hyperband")
    with pytest.raises(InvalidArgument, match="its own HyperBand, not with 'asha'"):
        choose_method("bohb", "asha")


def test_two_schedulers_or_an_unknown_name_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="is a scheduler, and the scheduler is 'asha' already"):
        choose_method("hyperband", "asha")
    with pytest.raises(InvalidArgument, match="no searcher named 'randm'") as caught:
        choose_method("randm", "asha")
    assert caught.value.hint == "did you mean 'random'?"
