"""Rounds of pfl, in an environment of its own: prints the seconds of each, the accuracy and the peak memory as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import nn

from benchmarks import federated_digits as digits


class Clock(TrainingProcessCallback):
    """The end of each round."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def after_central_iteration(self, aggregate_metrics: object, model: object, *, central_iteration: int) -> object:
        """Called by pfl."""
        self.times.append(time.perf_counter())
        from pfl.metrics import Metrics

        return False, Metrics()


class Net(nn.Module):
    """The model with what pfl calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = digits.model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores."""
        return self.inner(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        """Of a batch; pfl calls it in each step."""
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> dict[str, object]:
        """None: the rounds of others measure none on clients."""
        return {}


def main(num_rounds: int) -> None:
    """Run and print."""
    torch.set_num_threads(1)
    np.random.seed(0)
    parts = digits.parts()
    sampler = get_user_sampler("minimize_reuse", list(range(digits.NUM_CLIENTS)))
    dataset = FederatedDataset(
        lambda user: Dataset(raw_data=[parts[user].images, parts[user].labels], user_id=str(user)), sampler
    )
    net = Net()
    model = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0)
    )
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=num_rounds,
            evaluation_frequency=num_rounds + 1,  # the first round is measured, too, and left out
            train_cohort_size=digits.PER_ROUND,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=digits.RATE, local_batch_size=digits.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=digits.BATCH),
        callbacks=[clock],
    )
    times = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"times": times, "accuracy": digits.accuracy(net), "peak_bytes": peak}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
