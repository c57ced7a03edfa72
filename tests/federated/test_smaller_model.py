"""Clients with pruned and rounded weights: what training sees, and the weights of a plain loop that does the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.federated.small_task import Points, SmallTask, batches
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated import FederatedConfig, FedNova, Scaffold, SmallerModel, simulate
from torsh_distributed.federated.rounds.round_loop import RoundLoop
from torsh_distributed.federated.rounds.round_order import RoundOrder

CLIENTS, ROUNDS, EPOCHS, RATE = 3, 2, 2, 0.1


class WatchedTask(SmallTask):
    """Notes the first matrix whenever a forward begins, and the one that training ends with."""

    def __init__(self) -> None:
        super().__init__(rate=RATE, momentum=0.9)
        self.matrices: list[Tensor] = []

    def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
        def note(module: nn.Module, args: object) -> None:
            self.matrices.append(model[0].weight.detach().clone())  # type: ignore[index]

        handle = model.register_forward_pre_hook(note)
        try:
            return super().train(model, data, epochs)
        finally:
            handle.remove()


def plain_rounds(smaller: SmallerModel, first: nn.Module) -> list[Tensor]:
    """The same by a loop of its own: masks by a threshold, a rounded copy of the model for each gradient."""
    whole, seen = copy.deepcopy(first), []
    parts = SmallTask().partition(CLIENTS)
    for _ in range(ROUNDS):
        start = [param.detach().clone() for param in whole.parameters()]
        total = [torch.zeros_like(param) for param in start]
        for data in parts:
            masks = []
            for param in start:
                if param.dim() > 1 and smaller.sparsity:
                    kth = param.abs().flatten().kthvalue(int(smaller.sparsity * param.numel())).values
                    masks.append((param.abs() > kth).float())
                else:
                    masks.append(torch.ones_like(param))
            values = [param * mask for param, mask in zip(start, masks, strict=True)]
            momenta = [torch.zeros_like(param) for param in start]
            for _ in range(EPOCHS):
                for images, labels in batches(data):
                    model = copy.deepcopy(whole)
                    for param, value in zip(model.parameters(), values, strict=True):
                        seen_value = value
                        if value.dim() > 1 and smaller.bits is not None:
                            step = value.abs().max() / (2 ** (smaller.bits - 1) - 1)
                            seen_value = torch.round(value / step) * step
                        param.data.copy_(seen_value)
                    grads = torch.autograd.grad(cross_entropy(model(images), labels), list(model.parameters()))
                    for momentum, grad, mask, value in zip(momenta, grads, masks, values, strict=True):
                        momentum.mul_(0.9).add_(grad * mask)
                        value.sub_(RATE * momentum)
            for sum_, value, param, mask in zip(total, values, start, masks, strict=True):
                sum_.add_((value - param) * mask, alpha=len(data))
        for param, sum_ in zip(whole.parameters(), total, strict=True):
            param.data.add_(sum_ / sum(len(data) for data in parts))
        seen.append(nn.utils.parameters_to_vector(whole.parameters()).detach().clone())
    return seen


@pytest.mark.parametrize(
    "smaller", [SmallerModel(sparsity=0.5), SmallerModel(bits=4), SmallerModel(sparsity=0.7, bits=8)], ids=str
)
def test_the_weights_are_those_of_a_plain_loop(smaller: SmallerModel) -> None:
    task = WatchedTask()
    config = FederatedConfig(
        rounds=ROUNDS, clients_per_round=CLIENTS, min_clients=CLIENTS, local_epochs=EPOCHS, smaller_model=smaller
    )
    first = copy.deepcopy(simulate(SmallTask(), num_clients=CLIENTS, config=FederatedConfig(rounds=0)).model)
    simulate(task, num_clients=CLIENTS, config=config)
    torch.testing.assert_close(task.seen, plain_rounds(smaller, first), rtol=0, atol=1e-5)
    for matrix in task.matrices:
        num_zeros = int((matrix == 0).sum())
        assert num_zeros >= int(smaller.sparsity * matrix.numel())
        if smaller.bits is not None:
            assert len(matrix.unique()) <= 2**smaller.bits - 1
    assert (task.seen[-1] == 0).sum() == 0, "the server's model stays whole"


def test_the_order_of_a_device_has_it() -> None:
    config = FederatedConfig(smaller_model=SmallerModel(sparsity=0.25, bits=8))
    order = RoundLoop(SmallTask(), config, None)._order(0)  # type: ignore[arg-type]
    assert RoundOrder.from_plain(order.plain()).work_of("a").smaller == config.smaller_model


def test_what_cannot_be_smaller_is_refused() -> None:
    for values, message in (
        ({"sparsity": 1.0}, "below 1"),
        ({"bits": 1}, "from 2 to 16"),
        ({}, "a sparsity, bits or both"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            SmallerModel(**values)  # type: ignore[arg-type]
    for strategy in (Scaffold(), FedNova()):
        with pytest.raises(ConfigurationError, match="describes steps of the whole model"):
            FederatedConfig(strategy=strategy, smaller_model=SmallerModel(bits=8))


def test_a_task_without_an_optimizer_of_torch_cannot_be_pruned() -> None:
    class StillTask(SmallTask):
        def train(self, model: nn.Module, data: Points, epochs: int) -> Mapping[str, float]:
            return {}

    config = FederatedConfig(rounds=1, clients_per_round=1, smaller_model=SmallerModel(sparsity=0.5))
    with pytest.raises(Exception, match="took no step of an optimizer of torch"):
        simulate(StillTask(), num_clients=1, config=config)
