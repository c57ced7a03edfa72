from __future__ import annotations

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.events import EnergyEvent
from torsh_distributed.green.energy_budget import EnergyBudget
from torsh_distributed.green.power.pacing import MOST_PAUSE, PaceControl
from torsh_distributed.plan import GreenConfig


def interval(joules: float, g_per_kwh: float | None = None) -> EnergyEvent:
    return EnergyEvent(
        node=0, meter="m", source="rapl", is_measured=True, joules=joules, duration_s=1.0, g_per_kwh=g_per_kwh
    )


def test_a_budget_warns_before_it_is_spent_and_acts_within_one_interval() -> None:
    budget = EnergyBudget.wanted(GreenConfig(max_kwh=1e-3, on_budget="stop"))
    assert budget is not None
    said = []
    for number in range(1, 80):
        said += [(number, action, told) for action, told in budget.take(interval(100.0))]
    # 1 Wh is 3600 J: 80 % of it are passed with interval 29, all of it with 36.
    assert [(number, action) for number, action, _ in said] == [(29, "warn"), (36, "stop")]
    assert "0.001 of 0.001 kWh energy are spent (100%)" in said[1][2]


def test_an_epoch_has_a_budget_of_its_own_and_co2_is_counted_at_each_intervals_intensity() -> None:
    budget = EnergyBudget.wanted(GreenConfig(max_epoch_kwh=1.0, max_co2_kg=0.5, carbon="gb", on_budget="slow"))
    assert budget is not None
    assert budget.take(interval(3.6e6 * 0.7, 400.0)) == []
    budget.begin_epoch(1)
    said = budget.take(interval(3.6e6 * 0.7, 100.0))
    assert said == [], "0.7 kWh of this epoch, 0.35 kg in all"
    assert [action for action, _ in budget.take(interval(3.6e6 * 0.4, 500.0))] == ["slow", "slow"]
    assert EnergyBudget.wanted(GreenConfig()) is None


def test_the_co2_of_an_epoch_has_a_budget_that_begins_again_with_the_next() -> None:
    budget = EnergyBudget.wanted(GreenConfig(max_epoch_co2_kg=0.5, carbon="gb", on_budget="stop"))
    assert budget is not None
    assert [action for action, _ in budget.take(interval(3.6e6, 450.0))] == ["warn"]
    budget.begin_epoch(1)
    (news,) = budget.take_news()
    assert (news.name, news.spent, news.action) == ("CO2 of this epoch", 0.0, "ok")
    assert budget.take(interval(3.6e6, 300.0)) == []
    later = EnergyBudget(GreenConfig(max_epoch_co2_kg=0.5, carbon="gb", on_budget="stop"), budget.to_dict())
    assert [action for action, _ in later.take(interval(3.6e6, 300.0))] == ["stop"]


def test_what_an_earlier_version_wrote_down_counts_on() -> None:
    kept = {"spent": {"energy": 0.9, "energy of this epoch": 0.1, "CO2": 0.0}, "epoch": 2}
    budget = EnergyBudget(GreenConfig(max_kwh=1.0), kept)
    assert [action for action, _ in budget.take(interval(3.6e6 * 0.05))] == ["warn"]


def test_what_a_feed_needs_is_said_before_the_run() -> None:
    for values, match in (
        ({"carbon": "file"}, "needs green.carbon_file"),
        ({"carbon": "country"}, "needs green.zone"),
        ({"carbon": "gb", "zone": "FR"}, "GB alone"),
        ({"g_per_kwh": 3.0}, "no effect"),
        ({"max_co2_kg": 1.0}, "needs a carbon intensity"),
        ({"max_epoch_co2_kg": 1.0}, "needs a carbon intensity"),
        ({"strategy": "minimize_energy", "deadline": "tomorrow"}, "green.deadline is a time"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            GreenConfig(**values)


@pytest.mark.parametrize(("busy_w", "cap_w"), [(400.0, 250.0), (700.0, 300.0), (200.0, 250.0)])
def test_pauses_bring_the_mean_power_to_the_cap_within_three_percent_after_ten_seconds(
    busy_w: float, cap_w: float
) -> None:
    idle_w, control, powers = 80.0, PaceControl(cap_w), []
    control.update(idle_w, 1.0)  # before the first step
    for second in range(40):
        load_w = busy_w + 20 * (second % 3 - 1)
        powers.append(idle_w + (load_w - idle_w) / (1 + control.pause_share))
        control.update(powers[-1], 1.0)
    mean_w = sum(powers[10:]) / 30
    assert mean_w == pytest.approx(min(cap_w, busy_w), rel=0.03)


def test_a_cap_below_idle_power_cannot_be_reached_and_is_not_called_so() -> None:
    control = PaceControl(50.0)
    control.update(80.0, 1.0)
    assert control.update(300.0, 1.0) == MOST_PAUSE
    assert not control.is_reachable
