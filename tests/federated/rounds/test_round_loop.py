"""Rounds are retried, refused and continued as promised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.bed.world import World
from tests.federated.small_task import Points, SmallTask
from torsh_distributed import events
from torsh_distributed.errors import CheckpointError, CommunicationError, ConfigurationError, InvalidArgument
from torsh_distributed.federated import (
    Availability,
    Bulyan,
    FedAdam,
    FederatedConfig,
    FedProx,
    MultiKrum,
    RobustRule,
    RoundRecord,
    Scaffold,
    simulate,
)
from torsh_distributed.federated.rounds.round_file import RoundFile


class OddTask(SmallTask):
    """Clients 1 and 2 go wrong, each in its way; client 3 has no data."""

    def partition(self, num_clients: int) -> list[Points]:
        parts = list(super().partition(num_clients))
        self.sizes = [len(part) for part in parts]
        parts[3] = Points(parts[3].images[:0], parts[3].labels[:0])
        return parts

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        if len(data) == self.sizes[1]:
            raise KeyError("lost")
        figures = super().train(model, data, epochs)
        if len(data) == self.sizes[2]:
            with torch.no_grad():
                next(model.parameters())[0] = torch.nan
        return figures


def test_odd_clients_are_left_out_singly_with_the_reason() -> None:
    task, clean = OddTask(), SmallTask()
    config = FederatedConfig(rounds=1, clients_per_round=5)
    record = simulate(task, num_clients=5, config=config).rounds[0]
    assert record.failures == {
        "KeyError: 'lost'": 1,
        "it has values that are not finite": 1,
        "the client has no data": 1,
    }
    assert (record.num_chosen, record.num_updates) == (5, 2)

    class OnlyTheGood(SmallTask):
        def partition(self, num_clients: int) -> list[Points]:
            parts = super().partition(5)
            return [parts[0], parts[4]]

    clean = OnlyTheGood()
    simulate(clean, num_clients=2, config=config)
    torch.testing.assert_close(task.seen, clean.seen, rtol=0, atol=1e-7)


def test_a_round_without_enough_updates_is_tried_again_and_then_refused_with_the_reasons() -> None:
    config = FederatedConfig(rounds=3, clients_per_round=4, min_clients=3, max_attempts=20)
    result = simulate(SmallTask(), num_clients=8, config=config, availability=Availability(dropout=0.4))
    assert all(record.num_updates >= 3 for record in result.rounds)
    assert max(record.num_attempts for record in result.rounds) > 1
    with pytest.raises(CommunicationError, match="round 0 got 0 updates in 3 attempts, and needs 1: 5 × it did not"):
        simulate(
            SmallTask(),
            num_clients=5,
            config=FederatedConfig(clients_per_round=5),
            availability=Availability(dropout=1.0),
        )


class NotFiniteTask(SmallTask):
    """The smallest clients send values that are not finite."""

    def __init__(self, num_hostile: int) -> None:
        super().__init__()
        self.num_hostile = num_hostile

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        figures = super().train(model, data, epochs)
        if len(data) < 4 + 3 * self.num_hostile:
            nn.init.constant_(next(model.parameters()), torch.nan)
        return figures


@pytest.mark.parametrize("rule", [MultiKrum(hostile=2), Bulyan(hostile=2)], ids=lambda rule: rule.name)
def test_hostile_clients_do_not_end_a_round_by_updates_that_are_refused(rule: RobustRule) -> None:
    """They are some of the f that the rule reckons with; one more of them than that is one too many."""
    num_clients = rule.fewest
    config = FederatedConfig(rounds=2, clients_per_round=num_clients, min_clients=num_clients, rule=rule)
    records = simulate(NotFiniteTask(2), num_clients=num_clients, config=config).rounds
    assert [record.num_updates for record in records] == [num_clients - 2] * 2
    with pytest.raises(CommunicationError, match=f"{num_clients - 3} updates in 3 attempts, and needs {num_clients}"):
        simulate(NotFiniteTask(3), num_clients=num_clients, config=config)
    assert rule.hostile == 2
    with pytest.raises(CommunicationError, match="did not answer"):  # a client that is away is no hostile one
        simulate(SmallTask(), num_clients=num_clients, config=config, availability=Availability(dropout=0.3))


def test_updates_that_are_too_long_are_left_out() -> None:
    config = FederatedConfig(rounds=1, clients_per_round=3, max_update_norm=1e-9)
    with pytest.raises(CommunicationError, match="max_update_norm is 1e-09"):
        simulate(SmallTask(), num_clients=3, config=config)


class EpochsTask(SmallTask):
    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        super().train(model, data, epochs)
        return {"epochs": float(epochs)}


def test_stragglers_do_a_part_of_the_epochs_or_are_dropped() -> None:
    def run(*, partial_work: bool) -> RoundRecord:
        config = FederatedConfig(rounds=1, clients_per_round=20, local_epochs=5, partial_work=partial_work)
        return simulate(EpochsTask(), num_clients=20, config=config, availability=Availability(stragglers=0.5)).rounds[
            0
        ]

    partial, whole = run(partial_work=True), run(partial_work=False)
    assert partial.num_updates == 20
    assert 2.5 < partial.figures["client_epochs"] < 5
    assert whole.figures["client_epochs"] == 5
    assert whole.failures == {"it had no time for all epochs": 20 - whole.num_updates}
    assert 4 < whole.num_updates < 16


@pytest.mark.parametrize("strategy", [FedAdam(), Scaffold(), FedProx()], ids=lambda one: one.name)
def test_a_run_that_ended_early_goes_on_as_if_it_had_not(strategy: object, tmp_path: Path) -> None:
    def config(rounds: int) -> FederatedConfig:
        return FederatedConfig(rounds=rounds, clients_per_round=3, strategy=strategy)  # type: ignore[arg-type]

    straight, halves = SmallTask(), SmallTask()
    simulate(straight, num_clients=6, config=config(6))
    simulate(halves, num_clients=6, config=config(2), directory=tmp_path)
    result = simulate(halves, num_clients=6, config=config(6), directory=tmp_path)
    torch.testing.assert_close(halves.seen, straight.seen, rtol=0, atol=0)
    assert [record.round for record in result.rounds] == list(range(6))


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    def run(task: SmallTask, **changes: object) -> None:
        num_clients = int(changes.pop("num_clients", 3))  # type: ignore[call-overload]
        simulate(task, num_clients=num_clients, config=FederatedConfig(rounds=1, **changes), directory=tmp_path)  # type: ignore[arg-type]

    class WiderTask(SmallTask):
        def model(self) -> nn.Module:
            return nn.Linear(5, 3)

    run(SmallTask())
    with pytest.raises(CheckpointError, match="another model"):
        run(WiderTask())
    with pytest.raises(CheckpointError, match="another strategy"):
        run(SmallTask(), strategy=FedAdam())
    with pytest.raises(InvalidArgument, match="another number of clients"):
        run(SmallTask(), num_clients=4)
    path = tmp_path / "rounds.state"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="its digest does not match"):
        run(SmallTask())


def try_to_open(directory: Path) -> str:
    try:
        RoundFile(directory).held()
    except ConfigurationError as error:
        return error.message
    return ""


@pytest.mark.ranks
def test_two_processes_cannot_have_the_rounds_of_one_directory(world: World, tmp_path: Path) -> None:
    simulate(SmallTask(), num_clients=3, config=FederatedConfig(rounds=1), directory=tmp_path)
    assert world.run(try_to_open, tmp_path, num_ranks=1) == [""], "a run that has ended keeps nobody out"
    mine = [RoundFile(tmp_path).held() for _ in range(2)]
    assert "another process is at work in this directory" in world.run(try_to_open, tmp_path, num_ranks=1)[0]
    assert mine[0].read() is not None


def test_each_round_is_an_event() -> None:
    seen: list[events.Event] = []
    end = events.subscribe(seen.append, events.FederatedRoundEvent)
    try:
        result = simulate(SmallTask(), num_clients=3, config=FederatedConfig(rounds=2, clients_per_round=3))
    finally:
        end()
    assert [event.round for event in seen] == [0, 1]  # type: ignore[attr-defined]
    assert events.to_record(seen[1])["figures"] == result.rounds[1].figures


@pytest.mark.parametrize(
    "wrong",
    [
        {"rounds": -1},
        {"clients_per_round": 0},
        {"local_epochs": 0},
        {"min_clients": 11},
        {"max_update_norm": 0.0},
    ],
)
def test_odd_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        FederatedConfig(**wrong)  # type: ignore[arg-type]
