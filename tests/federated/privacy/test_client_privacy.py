"""Noise has the variance it says, ε is the accountant's, updates are clipped, and a run ends at its budget."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.federated.small_task import SmallTask
from torsh_distributed.errors import CheckpointError, ConfigurationError
from torsh_distributed.federated import (
    AdaptiveClipping,
    Availability,
    CentralPrivacy,
    FederatedConfig,
    FedProx,
    LocalPrivacy,
    Median,
    PoissonSelection,
    RandomSelection,
    Scaffold,
    simulate,
)
from torsh_distributed.federated.privacy.client_privacy import CentralNoise, clipped
from torsh_distributed.federated.privacy.privacy_spent import most_rounds, sampled_epsilon
from torsh_distributed.federated.privacy.secure_noise import noised, secure_noise

needs_accountant = pytest.mark.needs_dp_accounting


def test_noise_is_normal_with_the_variance_asked_for_and_never_the_same() -> None:
    values = secure_noise(400_000, 3.0)
    again = secure_noise(400_000, 3.0)
    assert not torch.equal(values, again)
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 3.0) < 0.02
    assert abs(float((values / 3).pow(4).mean()) - 3.0) < 0.08, "the fourth moment of a normal distribution"
    assert abs(float((values * again).mean())) < 0.08
    inside = float((values.abs() < 3.0).double().mean())
    assert abs(inside - math.erf(2**-0.5)) < 0.004
    assert secure_noise(0, 1.0).numel() == 0


def test_noised_values_lie_on_a_grid_that_does_not_depend_on_them() -> None:
    found = noised(torch.full((1000,), 0.1234567), 0.5)
    assert torch.equal(found, (found * 2**21).round() / 2**21)
    assert abs(float(found.mean()) - 0.1234567) < 0.1


def test_long_updates_are_shortened_and_short_ones_left() -> None:
    long, short = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
    torch.testing.assert_close(clipped(long, 1.0)[0], torch.tensor([0.6, 0.8]))
    assert clipped(long, 1.0)[1] is False
    assert clipped(short, 1.0) == (short, True)


@needs_accountant
@pytest.mark.parametrize(
    ("noise", "probability", "rounds", "delta", "epsilon"),
    [(1.0, 0.1, 100, 1e-3, 4.784350), (1.1, 0.01, 1000, 1e-5, 1.515), (1.0, 1.0, 10, 1e-3, 14.079351)],
)
def test_epsilon_is_that_of_the_accountant(
    noise: float, probability: float, rounds: int, delta: float, epsilon: float
) -> None:
    """Figures taken from dp-accounting by itself."""
    import dp_accounting
    import dp_accounting.pld

    event = dp_accounting.GaussianDpEvent(noise)
    if probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(probability, event)
    accountant = dp_accounting.pld.PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(event, rounds))
    found = sampled_epsilon(noise, probability, rounds, delta)
    assert abs(found - accountant.get_epsilon(delta)) < 1e-6
    assert abs(found - epsilon) < 1e-3


@needs_accountant
def test_the_budget_allows_the_most_rounds_that_stay_within_it() -> None:
    allowed = most_rounds(1.0, 0.1, 1e-3, 2.0)
    assert sampled_epsilon(1.0, 0.1, allowed, 1e-3) <= 2.0 < sampled_epsilon(1.0, 0.1, allowed + 1, 1e-3)
    assert most_rounds(1.0, 1.0, 1e-3, 0.1) == 0


def central(**changes: object) -> CentralPrivacy:
    return CentralPrivacy(**{"clip_norm": 0.5, "noise_multiplier": 1.0, "delta": 1e-3, **changes})  # type: ignore[arg-type]


@needs_accountant
@pytest.mark.slow
def test_a_run_ends_before_the_round_that_would_go_beyond_the_budget(tmp_path: Path) -> None:
    config = FederatedConfig(rounds=50, selection=PoissonSelection(0.3), privacy=central(budget=6.0))
    result = simulate(SmallTask(), num_clients=10, config=config, directory=tmp_path)
    allowed = most_rounds(1.0, 0.3, 1e-3, 6.0)
    assert 1 <= len(result.rounds) == allowed < 50
    assert result.stopped == "another round would cost more than the budget of ε = 6"
    spent = result.rounds[-1].epsilon
    assert spent is not None
    assert spent <= 6.0
    assert abs(spent - sampled_epsilon(1.0, 0.3, allowed, 1e-3)) < 1e-6
    again = simulate(SmallTask(), num_clients=10, config=config, directory=tmp_path)
    assert len(again.rounds) == allowed, "a budget that is spent stays spent"
    louder = FederatedConfig(rounds=50, selection=PoissonSelection(0.3), privacy=central(budget=60.0))
    with pytest.raises(CheckpointError, match="another privacy"):
        simulate(SmallTask(), num_clients=10, config=louder, directory=tmp_path)


class StillTask(SmallTask):
    """Clients that send zeros: what the model does is the noise."""

    def model(self) -> nn.Module:
        return nn.Linear(300, 100)

    def train(self, model: nn.Module, data: object, epochs: int) -> None:
        """Nothing."""


def changes_of(task: SmallTask) -> Tensor:
    return task.seen[1] - task.seen[0]


@needs_accountant
@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_the_noise_does_not_depend_on_how_many_clients_answer(dropout: float) -> None:
    task = StillTask()
    config = FederatedConfig(rounds=2, selection=PoissonSelection(0.5), privacy=central(noise_multiplier=2.0))
    simulate(task, num_clients=8, config=config, availability=Availability(dropout=dropout))
    # clip 0.5 times 2, divided by the expected four clients
    assert abs(float(changes_of(task).std()) - 0.25) < 0.01


@needs_accountant
def test_locally_every_client_adds_its_own_noise_until_its_budget_is_spent() -> None:
    task = StillTask()
    privacy = LocalPrivacy(clip_norm=0.5, noise_multiplier=4.0, delta=1e-3, budget=1.7)
    config = FederatedConfig(rounds=50, clients_per_round=4, privacy=privacy)
    result = simulate(task, num_clients=4, config=config)
    # weights 4, 7, 10, 13 of 34; each client's noise is 2 x 0.5 x 4
    expected = 4.0 * math.sqrt(sum((size / 34) ** 2 for size in (4, 7, 10, 13)))
    assert abs(float(changes_of(task).std()) - expected) < 0.05 * expected
    assert len(result.rounds) == most_rounds(4.0, 1.0, 1e-3, 1.7) >= 2
    assert result.stopped == "every client has spent its budget of ε = 1.7"


def test_the_clip_norm_moves_to_the_share_that_is_asked_for() -> None:
    """Lengths 1 to 100; half of them shall be shorter than the clip norm."""
    privacy = central(clip_norm=1.0, adaptive=AdaptiveClipping(count_noise=1.0))
    noise = CentralNoise(privacy)
    lengths = torch.arange(1.0, 101.0)
    for _ in range(80):
        num_unclipped = int((lengths <= noise.clip_norm).sum())
        noise.private_mean(torch.zeros(1), num_unclipped, 100, 100.0)
    assert 40 < noise.clip_norm < 60
    z, count = privacy.update_noise_multiplier, 2 * 1.0
    assert abs((z**-2 + count**-2) ** -0.5 - privacy.noise_multiplier) < 1e-9, "both releases cost what one would"


def test_what_does_not_fit_together_is_refused() -> None:
    for wrong, message in (
        ({"privacy": central(), "selection": RandomSelection()}, "belong together"),
        ({"selection": PoissonSelection(0.5)}, "belong together"),
        ({"privacy": central(), "selection": PoissonSelection(0.5), "rule": Median(hostile=0)}, "exclude each other"),
        ({"rule": Median(hostile=2)}, "with f = 2 that is 5 updates, and n = 1"),
        ({"rule": Median(hostile=0), "strategy": Scaffold()}, "scaffold averages more than updates"),
        (
            {"privacy": central(), "selection": PoissonSelection(0.5), "strategy": Scaffold()},
            "scaffold averages more than updates",
        ),
    ):
        with pytest.raises(ConfigurationError, match=message):
            FederatedConfig(**wrong)  # type: ignore[arg-type]
    for name, value in (("clip_norm", 0.0), ("noise_multiplier", -1.0), ("delta", 0.0), ("budget", 0.0)):
        with pytest.raises(ConfigurationError, match=name):
            central(**{name: value})
    with pytest.raises(ConfigurationError, match="takes all of the privacy"):
        central(adaptive=AdaptiveClipping(count_noise=0.4))


def test_a_rule_takes_the_place_of_the_mean_in_a_run() -> None:
    """With the median of three clients, the weights are those of a plain loop over it."""
    task = SmallTask()
    config = FederatedConfig(
        rounds=3, clients_per_round=3, min_clients=3, rule=Median(hostile=1), strategy=FedProx(mu=0.1)
    )
    simulate(task, num_clients=3, config=config)

    class OneByOne(SmallTask):
        """One of the three clients alone."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def partition(self, num_clients: int) -> list[object]:
            return [super().partition(3)[self.index]]

    singles = []
    for index in range(3):
        one = OneByOne(index)
        simulate(one, num_clients=1, config=FederatedConfig(rounds=1, clients_per_round=1, strategy=FedProx(mu=0.1)))
        singles.append(one.seen[0])
    torch.testing.assert_close(task.seen[0], torch.stack(singles).median(dim=0).values, rtol=0, atol=1e-6)
