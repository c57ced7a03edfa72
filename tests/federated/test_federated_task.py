"""A task is found in its file, and what it lacks is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.federated.small_task import SmallTask
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated import FederatedTask, load_task, simulate

ONE = """
from helper import SIZE
from torch import nn
from torsh_distributed.federated import FederatedTask

class Mine(FederatedTask):
    def model(self):
        return nn.Linear(SIZE, 1)
    def train(self, model, data, epochs):
        return None
"""


def test_the_task_of_a_file_is_found_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("SIZE = 7")
    (tmp_path / "task.py").write_text(ONE)
    model = load_task(tmp_path / "task.py").model()
    assert isinstance(model, nn.Linear)
    assert model.in_features == 7


def test_files_without_one_task_are_refused(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("x = 1")
    (tmp_path / "two.py").write_text(
        ONE.replace("SIZE", "3").replace("from helper import 3", "") + "\na, b = Mine(), Mine()"
    )
    with pytest.raises(ConfigurationError, match="has 0"):
        load_task(tmp_path / "none.py")
    with pytest.raises(ConfigurationError, match="has 2"):
        load_task(tmp_path / "two.py")
    with pytest.raises(InvalidArgument, match="no such file"):
        load_task(tmp_path / "missing.py")


class Bare(FederatedTask):
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train(self, model: nn.Module, data: object, epochs: int) -> None:
        """Nothing."""


def test_a_task_says_what_it_cannot_do() -> None:
    with pytest.raises(InvalidArgument, match="it has no partition"):
        simulate(Bare(), num_clients=2)
    with pytest.raises(InvalidArgument, match="it has no device_data"):
        Bare().device_data("phone")

    class Unequal(SmallTask):
        def partition(self, num_clients: int) -> list[object]:
            return [1]

    with pytest.raises(InvalidArgument, match="one part for each client"):
        simulate(Unequal(), num_clients=2)
    with pytest.raises(InvalidArgument, match="at least one client"):
        simulate(SmallTask(), num_clients=0)


def test_a_config_of_another_kind_is_refused() -> None:
    class Odd(SmallTask):
        config = {"rounds": 3}  # noqa: RUF012

    with pytest.raises(ConfigurationError, match="must be a FederatedConfig"):
        simulate(Odd(), num_clients=2)


def test_a_model_without_values_is_refused() -> None:
    class Empty(SmallTask):
        def model(self) -> nn.Module:
            return nn.ReLU()

    with pytest.raises(InvalidArgument, match="no parameters"):
        simulate(Empty(), num_clients=2)
