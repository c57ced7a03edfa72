"""What a user writes: a model, its training on one client's data, and how to measure it. Plain torch code."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from torsh_distributed.errors import ConfigurationError, InvalidArgument

_MODULE_NAME = "torsh_federated_task"


class FederatedTask(ABC):
    """The same class runs in a simulation, on the server and on devices.

    A strategy's part of local training (the proximal term, control variates) reaches `train` through the optimizer:
    it is added to the gradients before each step, so the loop needs to know nothing of it.
    """

    config: Any = None
    """A `FederatedConfig`; None takes its defaults. Options of the command line go first."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model. Every process makes one; the values come from the server."""

    @abstractmethod
    def train(self, model: nn.Module, data: Any, epochs: int) -> Mapping[str, float] | None:
        """Train the model in place on one client's data, with an optimizer of torch made here.

        torch's, numpy's and Python's random numbers are seeded before, by round and client. Returns figures to report,
        such as the mean loss.
        """

    def partition(self, num_clients: int) -> Sequence[Any]:
        """For simulations: the data of each virtual client. See `partitioning` for ways to divide data."""
        raise InvalidArgument(
            f"{type(self).__name__} cannot be simulated: it has no partition()",
            hint="def partition(self, num_clients): return one part of the data for each client",
        )

    def device_data(self, device: str) -> Any:
        """On a device: the data it has. `device` is its name."""
        raise InvalidArgument(
            f"{type(self).__name__} cannot run on devices: it has no device_data()",
            hint="def device_data(self, device): return the data of this device",
        )

    def num_samples(self, data: Any) -> int:
        """How many samples a client's data has: its weight in the mean."""
        return len(data)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Figures of the global model, measured by the server after each round, such as its accuracy."""
        return {}


def load_task(path: str | Path) -> FederatedTask:
    """The one task that a Python file defines: an instance of it, or its class."""
    path = Path(path)
    if not path.is_file():
        raise InvalidArgument("there is no such file with a task", path=str(path))
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    assert spec is not None, "a path was given"
    if spec.loader is None:
        raise InvalidArgument("a task is a Python file", path=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: files beside it can be imported
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found = [value for value in vars(module).values() if isinstance(value, FederatedTask)]
    if not found:
        classes = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == _MODULE_NAME]
        found = [kind() for kind in classes if issubclass(kind, FederatedTask) and not inspect.isabstract(kind)]
    if len(found) != 1:
        raise ConfigurationError(
            f"the file must have one task, and has {len(found)}",
            hint="define one class derived from FederatedTask, or one instance if there are several classes",
            path=str(path),
        )
    return found[0]
