"""The forecast learns the order of a step, and its distance follows the hit rate."""

from __future__ import annotations

import math

from torsh_distributed.parallel.offload.paging.pager import Forecast

STEP = [0, 1, 2, 3, 3, 2, 1, 0]


def run_step(forecast: Forecast, order: list[int], *, is_hit: bool = True) -> None:
    for index in order:
        forecast.note(index, is_hit=is_hit)
    forecast.end_step()


def test_the_order_of_a_step_predicts_the_next() -> None:
    forecast = Forecast([], max_distance=3)
    run_step(forecast, STEP)
    forecast.note(0, is_hit=True)
    forecast.note(1, is_hit=True)
    assert forecast.upcoming() == [2, 3, 3]
    assert [forecast.uses_until(index) for index in (2, 3, 1, 0)] == [0, 1, 4, 5]
    assert forecast.uses_until(9) == math.inf


def test_nothing_is_fetched_beyond_the_update() -> None:
    forecast = Forecast(STEP, max_distance=3)
    for index in STEP[:-1]:
        forecast.note(index, is_hit=True)
    assert forecast.upcoming() == [0]


def test_a_unit_out_of_order_does_not_lose_the_position() -> None:
    forecast = Forecast(STEP, max_distance=1)
    for index in (0, 7, 1):
        forecast.note(index, is_hit=False)
    assert forecast.upcoming() == [2]


def test_the_distance_follows_the_hit_rate() -> None:
    forecast = Forecast(STEP, max_distance=6)
    distances = [forecast.distance]
    for is_hit in (True, True, True, False, False, False, False, False):
        run_step(forecast, STEP, is_hit=is_hit)
        distances.append(forecast.distance)
    assert distances == [2, 3, 4, 6, 4, 2, 2, 1, 1]
    for hits in (5, 6, 7):  # 62, 75 and 88 % of eight
        forecast = Forecast(STEP, max_distance=6)
        for number, index in enumerate(STEP):
            forecast.note(index, is_hit=number < hits)
        forecast.end_step()
        assert forecast.distance == (1 if hits == 5 else 2)


def test_without_a_buffer_everything_is_fetched_on_demand() -> None:
    forecast = Forecast(STEP, max_distance=0)
    run_step(forecast, STEP, is_hit=False)
    assert forecast.distance == 0
    assert forecast.upcoming() == []
