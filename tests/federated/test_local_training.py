"""One client's training: what it adds to steps is its own, whatever trains beside it in the process."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.federated.small_task import Points, SmallTask
from torsh_distributed.federated.local_training import LocalWork, train_client
from torsh_distributed.federated.model_vector import ModelVector


def trained(task: SmallTask, replica: ModelVector, start: torch.Tensor) -> torch.Tensor:
    work = LocalWork(round=0, client="c", epochs=1, seed=1, proximal=0.5)
    return train_client(task, replica, start, task.partition(2)[1], work, {})[0].delta


def test_a_training_that_begins_and_ends_during_a_step_of_another_changes_nothing() -> None:
    task = SmallTask()
    replicas = [ModelVector(task.model()) for _ in range(2)]
    start = replicas[0].read()
    expected = trained(task, replicas[0], start)
    found: list[torch.Tensor] = []

    def beside(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """In the middle of torch's round through its hooks."""
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: found.append(trained(task, replicas[1], start)))
            other.start()
            other.join(20)

    handle = register_optimizer_step_pre_hook(beside)
    try:
        torch.testing.assert_close(trained(task, replicas[0], start), expected, rtol=0, atol=0)
    finally:
        handle.remove()
    assert found
    for delta in found:
        torch.testing.assert_close(delta, expected, rtol=0, atol=0)


class EpochsTask(SmallTask):
    """A new optimizer for each epoch, as many loops have."""

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        for _ in range(epochs):
            figures = super().train(model, data, 1)
        return figures


def test_an_optimizer_for_each_epoch_begins_without_momentum_in_fednovas_account_too() -> None:
    task = EpochsTask(rate=0.1, momentum=0.6)
    replica = ModelVector(task.model())
    work = LocalWork(round=0, client="c", epochs=3, seed=1, wants_step_norm=True)
    update, _ = train_client(task, replica, replica.read(), task.partition(2)[1], work, {})
    assert update.num_steps == 6
    assert math.isclose(update.step_norm, 0.1 * 3 * (1 + 1.6), rel_tol=1e-9)
