"""The Engine: one optimizer step at a time, over whatever strategy the plan names."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed import events
from torsh_distributed.comm import process_group
from torsh_distributed.errors import BackendNotInitialized, InvalidArgument
from torsh_distributed.parallel.data import DataParallel
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.train.sharding import Batch, count_samples, sharded, take_rows, to_device

_log = logging.getLogger(__name__)

LossFn = Callable[[Any, Any], Tensor]


def parallelize(
    model: nn.Module, optimizer: Optimizer, plan: Plan | None = None, *, loss_fn: LossFn | None = None
) -> Engine:
    """Spread `model` over the world as the plan says and return the Engine that trains it; every rank calls this.

    `loss_fn(outputs, targets)` is called with the model's output and the second half of each `(inputs, targets)` batch;
    without it the model is called with the whole batch and must return the loss. Parameters and buffers become those of
    rank 0. What the plan asks for and this version cannot do is refused here, before the first step.
    """
    chosen = plan or Plan()
    if not process_group.is_initialized():
        raise BackendNotInitialized("parallelize() needs the process group")
    chosen.require_supported()
    chosen = chosen.resolve(process_group.get_world_size())
    _check_optimizer(model, optimizer)
    return Engine(DataParallel(model, chosen.ddp, chosen.distributed), optimizer, chosen, loss_fn=loss_fn)


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """The optimizer must hold this model's parameters: a model rebuilt after the optimizer would never learn."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained = {id(param): name for name, param in model.named_parameters() if param.requires_grad}
    if not trained:
        raise InvalidArgument(
            "the model has no parameter that requires a gradient", hint="unfreeze the part that should learn"
        )
    if not held & trained.keys():
        raise InvalidArgument(
            "the optimizer holds none of the model's parameters",
            hint="build the optimizer from model.parameters() after the model has its final shape and device",
            first_parameter=next(iter(trained.values())),
        )


class Engine:
    """Steps of training: `step(batch)`, or `forward`, `backward` and `apply` in a loop of your own."""

    def __init__(self, strategy: Strategy, optimizer: Optimizer, plan: Plan, *, loss_fn: LossFn | None) -> None:
        self.strategy = strategy
        self.optimizer = optimizer
        self.plan = plan
        self.num_steps = 0
        """Optimizer updates done so far."""
        self.epoch = 0
        self._num_batches = 0
        self._loss_fn = loss_fn
        self._device = next(strategy.model.parameters()).device
        self._global_batch: int | None = None
        self._grad_norm: float | None = None

    @property
    def model(self) -> nn.Module:
        """The wrapped module; `unwrapped` is the user's own."""
        return self.strategy.model

    @property
    def unwrapped(self) -> nn.Module:
        """The user's model, as it was given."""
        inner = getattr(self.strategy.model, "module", self.strategy.model)
        assert isinstance(inner, nn.Module)
        return inner

    def batches(self, loader: Iterable[Batch], *, epochs: int | None = None) -> Iterator[Batch]:
        """This rank's share of every batch of `loader`, over and over until `training.steps` updates are done.

        The loader's batches are global: the same at every world size, each sample seen by one rank. After
        `load_state_dict` the first epoch goes on where it stopped. `epochs` ends it earlier.
        """
        last = None if epochs is None else self.epoch + epochs
        while (last is None or self.epoch < last) and self.num_steps < self.plan.training.steps:
            found, was_whole_epoch = False, self._num_batches == 0
            for batch, total in self._sharded(loader, epoch=self.epoch, skip=self._num_batches):
                self._num_batches += 1
                if total < self.strategy.data_degree:
                    _log.warning("a batch of %d samples is left out: it has fewer than there are ranks", total)
                    continue
                found = True
                self._global_batch = total
                yield to_device(batch, self._device)
                if self.num_steps >= self.plan.training.steps:
                    return
            if not found and was_whole_epoch:
                raise InvalidArgument(
                    "the loader gave no batch that every rank can have a share of",
                    hint="give it more samples, or a larger batch_size: a batch needs a sample for each rank",
                    num_ranks=self.strategy.data_degree,
                )
            self.epoch += 1
            self._num_batches = 0

    def step(self, batch: Batch) -> float:
        """One optimizer update on this rank's `batch`; returns the mean loss over the whole batch, on every rank.

        The batch is cut into `training.gradient_accumulation` microbatches; gradients travel with the last one.
        After an exception the parameters are as before the step.
        """
        started = time.monotonic()
        num_samples = count_samples(batch)
        weight = self._weight(num_samples)
        pieces = self._microbatches(batch, num_samples)
        self.strategy.take_comm_s()
        losses = []
        for number, (piece, share) in enumerate(pieces):
            with self.strategy.accumulating(is_last=number == len(pieces) - 1):
                loss = self.forward(piece) * (share * weight)
                losses.append(loss.detach())
                if number == len(pieces) - 1:
                    # Started before backward, so that it travels for nothing while gradients are computed.
                    mean = self.strategy.mean_loss(torch.stack(losses).sum())
                loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        self.apply()
        value = mean.wait()
        self._report(value, num_samples, time.monotonic() - started)
        return value

    def forward(self, batch: Batch) -> Tensor:
        """The loss of one (micro)batch, in the plan's precision."""
        return self._loss(self.model, batch)

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with self._precision():
            if self._loss_fn is None:
                output = _call(model, batch)
                loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", output)
            else:
                inputs, targets = _pair(batch)
                loss = self._loss_fn(_call(model, inputs), targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise InvalidArgument(
                "the loss must be a tensor with one value",
                hint="average it over the batch: loss.mean()",
                got=type(loss).__name__ if not isinstance(loss, Tensor) else tuple(loss.shape),
            )
        return loss

    def backward(self, loss: Tensor) -> None:
        """Gradients of `loss`, averaged over the ranks unless inside `strategy.accumulating(is_last=False)`."""
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch

    def apply(self) -> None:
        """Clip as the plan says, update the parameters, forget the gradients, count the step."""
        max_norm = self.plan.training.gradient_clipping
        self._grad_norm = None if max_norm is None else self.strategy.clip_grad_norm(max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Batch]) -> float:
        """The mean loss over every sample of `loader`, each looked at by one rank; every rank gets the same value."""
        was_training = self.model.training
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch, _ in self._sharded(loader, epoch=0, skip=0):
            if batch is None:
                continue  # other ranks look at these samples
            count = count_samples(batch)
            loss = self._loss(self.unwrapped, to_device(batch, self._device))
            total += torch.stack([loss.double() * count, torch.tensor(float(count), device=self._device)])
        self.model.train(was_training)
        loss_sum = self.strategy.mean_loss(total[0]).wait()
        count_sum = self.strategy.mean_loss(total[1]).wait()
        if count_sum == 0:
            raise InvalidArgument("there is nothing to evaluate: the loader gave no batch", hint="check the loader")
        return loss_sum / count_sum

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: model, optimizer, step, and the place in the data."""
        return {
            "model": self.unwrapped.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "epoch": self.epoch,
            "num_batches": self._num_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, at the same or another world size; call it on every rank with equal state."""
        self.unwrapped.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        self.epoch = state["epoch"]
        self._num_batches = state["num_batches"]

    def _sharded(self, loader: Iterable[Batch], *, epoch: int, skip: int) -> Iterator[tuple[Batch, int]]:
        return sharded(
            loader,
            part=self.strategy.data_rank,
            num_parts=self.strategy.data_degree,
            seed=self.plan.training.seed,
            epoch=epoch,
            skip=skip,
        )

    def _weight(self, num_samples: int) -> float:
        """Corrects for uneven shares of a ragged last batch: ranks are averaged equally, samples must be."""
        total, self._global_batch = self._global_batch, None
        return 1.0 if total is None else num_samples * self.strategy.data_degree / total

    def _microbatches(self, batch: Batch, num_samples: int) -> list[tuple[Batch, float]]:
        """The batch in `gradient_accumulation` pieces (fewer, if it has fewer samples), each with its share of it."""
        count = min(self.plan.training.gradient_accumulation, num_samples)
        if count == 1:
            return [(batch, 1.0)]
        edges = [number * num_samples // count for number in range(count + 1)]
        return [
            (take_rows(batch, start, stop), (stop - start) / num_samples) for start, stop in itertools.pairwise(edges)
        ]

    def _precision(self) -> AbstractContextManager[None]:
        if self.plan.precision.dtype == "bf16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _report(self, loss: float, num_samples: int, duration_s: float) -> None:
        comm_s = self.strategy.take_comm_s()
        if events.wanted(events.StepEvent):
            events.emit(
                events.StepEvent(
                    step=self.num_steps,
                    loss=loss,
                    duration_s=duration_s,
                    comm_s=comm_s,
                    num_samples=num_samples * self.strategy.data_degree,
                    grad_norm=self._grad_norm,
                    learning_rate=float(self.optimizer.param_groups[0]["lr"]),
                )
            )


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _pair(batch: Batch) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise InvalidArgument(
        "with a loss_fn a batch must be a pair (inputs, targets)",
        hint="let the loader yield pairs, or leave loss_fn out and return the loss from the model",
        got=f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__,
    )
