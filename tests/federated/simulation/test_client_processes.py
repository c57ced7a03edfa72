"""Processes change only the time: the weights are those of one process. A worker that ends is an error in words."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.federated.small_task import Points, SmallTask
from torsh_distributed.errors import ProcessFailure, SerializationError
from torsh_distributed.federated import Availability, FederatedConfig, MultiKrum, Scaffold, simulate

pytestmark = pytest.mark.ranks


class EndingTask(SmallTask):
    """A worker ends in the middle of a round, once; a file says that it has."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker, self.parent = marker, os.getpid()

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        if os.getpid() != self.parent and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(model, data, epochs)


def test_processes_give_the_weights_of_one_also_after_one_was_killed(tmp_path: Path) -> None:
    config = FederatedConfig(rounds=4, clients_per_round=5, local_epochs=2, strategy=Scaffold())
    availability = Availability(dropout=0.2, stragglers=0.3)
    alone = SmallTask()
    simulate(alone, num_clients=9, config=config, availability=availability)
    task = EndingTask(str(tmp_path / "marker"))

    def run() -> None:
        simulate(
            task, num_clients=9, config=config, num_workers=2, availability=availability, directory=tmp_path / "run"
        )

    with pytest.raises(ProcessFailure, match="ended in the middle of a round"):
        run()
    run()
    assert len(task.seen) == config.rounds
    torch.testing.assert_close(task.seen, alone.seen, rtol=0, atol=1e-7)


class OddTask(SmallTask):
    """Two of nine clients send no numbers."""

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        figures = super().train(model, data, epochs)
        if len(data) < 10:
            nn.init.constant_(next(model.parameters()), float("nan"))
        return figures


def test_processes_say_which_updates_were_odd_so_a_rule_knows_what_is_out() -> None:
    config = FederatedConfig(rounds=1, clients_per_round=9, min_clients=9, max_attempts=1, rule=MultiKrum(hostile=3))
    seen = []
    for num_workers in (1, 2):
        task = OddTask()
        simulate(task, num_clients=9, config=config, num_workers=num_workers)
        seen.append(task.seen)
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-7)


def test_a_task_that_cannot_be_sent_is_refused_before_workers_start() -> None:
    class Inside(SmallTask):
        """A class that no other process can import."""

    with pytest.raises(SerializationError, match="give the path of the file"):
        simulate(Inside(), num_clients=2, num_workers=2)
