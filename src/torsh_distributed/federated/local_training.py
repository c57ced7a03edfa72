"""One client's part of a round: the task's own training loop, with the strategy's terms added at each optimizer step.

The terms are added in a hook before the step, the one place that every training loop passes:

    FedProx    gradient + mu (y - x)          x: the model that the round began with, y: the client's
    SCAFFOLD   gradient + c - c_i             c, c_i: control variates of the server and of the client
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.privacy.client_privacy import clipped
from torsh_distributed.federated.privacy.secure_noise import noised
from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
from torsh_distributed.federated.random_seeds import seed_everything
from torsh_distributed.federated.smaller_model import ShrunkWeights, SmallerModel
from torsh_distributed.federated.vector_codec import WHOLE, decoded, encoded

CONTROL = "control"
"""SCAFFOLD's name for its vectors, on the wire and in a client's state."""
RESIDUAL = "residual"
"""What a client's codec has left out so far, in its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalWork:
    """What a client is asked to do in a round."""

    round: int
    client: str
    epochs: int
    seed: int
    proximal: float = 0.0
    """mu of FedProx; 0 adds nothing."""
    control: Tensor | None = None
    """c of SCAFFOLD; None: another strategy."""
    wants_step_norm: bool = False
    """Whether the strategy compares clients by `ClientUpdate.step_norm`."""
    local_clip: float | None = None
    """Local privacy: the update is clipped to this norm and gets noise before it leaves the client."""
    local_noise_std: float = 0.0
    secure: SecureAggregation | None = None
    """The update is put on its grid, and counts as often as it says."""
    upload: str = WHOLE
    """The codec of the update."""
    codec_seed: int = 0
    """Of the codec's random numbers."""
    error_feedback: bool = False
    """Whether what the codec leaves out is added to the client's next update."""
    smaller: SmallerModel | None = None
    """What is trained in place of the whole model."""


@dataclass(kw_only=True, slots=True)
class ClientUpdate:
    """What a client did in a round."""

    client: str
    round: int
    delta: Tensor
    """The client's model less the one that the round began with."""
    num_samples: int
    num_steps: int
    step_norm: float = 0.0
    """How far steps of gradient 1 would have gone: the learning rate times FedNova's a_i."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Further vectors that the strategy averages."""
    figures: dict[str, float] = field(default_factory=dict)
    duration_s: float = 0.0
    message: Tensor | None = None
    """What is sent in place of `delta`, which is then what the server makes of it."""

    @property
    def num_bytes(self) -> int:
        """Of its vectors, as they are sent."""
        sent = self.delta if self.message is None else self.message
        return sum(vector.nbytes for vector in (sent, *self.extras.values()))


def train_client(
    task: FederatedTask, replica: ModelVector, start: Tensor, data: Any, work: LocalWork, state: Mapping[str, Tensor]
) -> tuple[ClientUpdate, dict[str, Tensor]]:
    """Train from `start` in the replica's model; returns the update, and the client's state if the round counts.

    `state` is what earlier rounds left on this client. Raises what the task raises.
    """
    if task.num_samples(data) < 1:
        raise InvalidArgument("the client has no data", client=work.client)
    replica.write(start)
    replica.model.train()
    seed_everything(work.seed)
    own_control = state.get(CONTROL)
    if work.control is not None and own_control is None:
        own_control = torch.zeros_like(work.control)
    began_s = time.perf_counter()
    with _corrected_steps(replica, start, work, own_control) as steps:
        figures = task.train(replica.model, data, work.epochs) or {}
    num_samples = task.num_samples(data)  # an aggregator knows it once its own clients have answered
    reached = replica.read()
    delta = reached - start
    if not math.isfinite(delta.sum().item()):
        delta.masked_fill_(reached == start, 0)  # a mask's infinite values have no difference
    if work.local_clip is not None:
        delta = _private(delta, work.local_clip, work.local_noise_std, replica.num_trained)
    if work.secure is not None:
        delta, num_samples = work.secure.on_grid(delta), work.secure.weight(num_samples)
    update = ClientUpdate(
        client=work.client,
        round=work.round,
        delta=delta,
        num_samples=num_samples,
        num_steps=steps.num_steps,
        step_norm=steps.norm,
        figures={name: float(value) for name, value in figures.items()},
        duration_s=time.perf_counter() - began_s,
    )
    if not steps.num_steps and (
        work.proximal or work.control is not None or work.wants_step_norm or work.smaller is not None
    ):
        raise InvalidArgument(
            "train() took no step of an optimizer of torch, by which this strategy works",
            hint="train with torch.optim, or choose strategy 'fedavg'",
            client=work.client,
        )
    new_state: dict[str, Tensor] = {}
    if work.control is not None:
        assert own_control is not None, "made above"
        new_state[CONTROL] = own_control - work.control - delta / steps.sum_of_rates
        update.extras[CONTROL] = new_state[CONTROL] - own_control
    if work.upload != WHOLE:
        whole = delta + state[RESIDUAL] if work.error_feedback and RESIDUAL in state else delta
        _encode(update, whole, work, replica)
        if work.error_feedback:
            new_state[RESIDUAL] = whole - update.delta
    return update, new_state


def _private(delta: Tensor, clip_norm: float, noise_std: float, num_trained: int) -> Tensor:
    """A clipped update with noise on what is trained. Nothing else may have changed: it would leave the client bare."""
    if bool(delta[num_trained:].any()):
        raise InvalidArgument(
            "training changed buffers or frozen parameters, which get no noise: private updates have none",
            hint="leave out what changes buffers, such as spectral_norm, and freeze and unfreeze in model()",
        )
    trained = noised(clipped(delta, clip_norm)[0][:num_trained], noise_std).to(delta.dtype)
    return torch.cat([trained, delta[num_trained:]])


def _encode(update: ClientUpdate, whole: Tensor, work: LocalWork, replica: ModelVector) -> None:
    """The update's message, and what the server makes of it."""
    counts = replica.num_trained, replica.num_parameters
    if bool(whole[counts[0] : counts[1]].any()):
        raise InvalidArgument(
            "train() changed parameters that model() had frozen, which updates by a codec leave out",
            hint="freeze and unfreeze in model(), or leave upload at 'none'",
        )
    update.message = encoded(work.upload, whole, work.codec_seed, *counts)
    update.delta = decoded(work.upload, update.message, whole, work.codec_seed, *counts)


class _LocalSteps:
    """Counts the steps of one client, and follows what unit gradients would have done."""

    def __init__(self, work: LocalWork) -> None:
        self._work = work
        self._optimizer: torch.optim.Optimizer | None = None
        self._momentum: float | None = None
        """Of the optimizer; None: it has taken no step."""
        self._place = 0.0
        self.num_steps = 0
        self.sum_of_rates = 0.0

    @property
    def norm(self) -> float:
        """See `ClientUpdate.step_norm`."""
        return -self._place

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is about to be taken."""
        self.num_steps += 1
        if self._work.control is None and not self._work.wants_step_norm:
            return
        group = self._only_group(optimizer)
        rate, momentum = float(group["lr"]), float(group["momentum"])
        self.sum_of_rates += rate
        # SGD itself, on one number whose gradient is 1.
        gradient = 1.0 + self._work.proximal * self._place
        if momentum:
            before, dampening = self._momentum, group["dampening"]
            self._momentum = gradient if before is None else momentum * before + (1 - dampening) * gradient
            gradient = gradient + momentum * self._momentum if group["nesterov"] else self._momentum
        self._place -= rate * gradient

    def _only_group(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The settings of all parameters; refuses what the strategy's equations do not describe."""
        is_scaffold = self._work.control is not None
        name = "SCAFFOLD" if is_scaffold else "FedNova"
        groups = optimizer.param_groups
        if optimizer is not self._optimizer:
            self._require_successor(optimizer, name)
            self._optimizer, self._momentum = optimizer, None
        if not isinstance(optimizer, torch.optim.SGD) or (is_scaffold and any(group["momentum"] for group in groups)):
            raise ConfigurationError(
                f"{name} is defined for {'plain SGD' if is_scaffold else 'SGD'} on the clients",
                hint="train with torch.optim.SGD" + (" without momentum" if is_scaffold else ""),
                optimizer=type(optimizer).__name__,
            )
        if len({(float(group["lr"]), float(group["momentum"])) for group in groups}) > 1:
            raise ConfigurationError(f"{name} needs one learning rate for all parameters of the client's optimizer")
        return groups[0]

    def _require_successor(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Another optimizer may take over, as one made for each epoch does; two side by side count every step twice."""
        before = () if self._optimizer is None else _params_of(self._optimizer)
        if before and {*map(id, before)}.isdisjoint(map(id, _params_of(optimizer))):
            raise ConfigurationError(
                f"{name} counts steps of the whole model, and each of several optimizers has a part of it",
                hint="give all parameters to one optimizer",
            )


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _StepHooks:
    """Calls functions before and after every optimizer step of this process, for trainings on several threads.

    Torch goes through its table of hooks while a step runs: adding one for each training would change the table under
    the steps of others. So there is one pair, from the first training that is open to the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: tuple[tuple[_StepHook, _StepHook], ...] = ()
        self._handles: list[Any] = []

    @contextmanager
    def calling(self, before: _StepHook, after: _StepHook) -> Iterator[None]:
        mine = (before, after)
        with self._lock:
            if not self._open:
                self._handles = [
                    register_optimizer_step_pre_hook(self._before),
                    register_optimizer_step_post_hook(self._after),
                ]
            self._open = (*self._open, mine)
        try:
            yield
        finally:
            with self._lock:
                self._open = tuple(one for one in self._open if one is not mine)
                for handle in () if self._open else self._handles:
                    handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for before, _ in self._open:
            before(optimizer, args, kwargs)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for _, after in self._open:
            after(optimizer, args, kwargs)


_StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]
_HOOKS = _StepHooks()


@contextmanager
def _corrected_steps(
    replica: ModelVector, start: Tensor, work: LocalWork, own_control: Tensor | None
) -> Iterator[_LocalSteps]:
    """While open, every step of an optimizer of the replica's parameters gets the strategy's terms."""
    record = _LocalSteps(work)
    anchors = replica.views(start) if work.proximal else {}
    controls = replica.views(work.control - own_control) if work.control is not None and own_control is not None else {}
    known = {id(param) for param in replica.model.parameters()}
    shrunk = None if work.smaller is None else ShrunkWeights(work.smaller)

    @torch.no_grad()
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        params = _params_of(optimizer)
        if not any(id(param) in known for param in params):
            return  # of another model, such as one that is distilled from
        if (anchors or controls or shrunk) and any(one is not None for one in (*args[1:], kwargs.get("closure"))):
            raise ConfigurationError(
                "a closure computes gradients after the strategy's terms were added",
                hint="call optimizer.step() without a closure, or choose strategy 'fedavg'",
            )
        record.add(optimizer)
        if shrunk is not None:
            shrunk.restore()
        for param in params:
            if param.grad is None or id(param) not in known:
                continue
            if anchors:
                param.grad.add_(param - anchors[id(param)], alpha=work.proximal)
            if controls:
                param.grad.add_(controls[id(param)])

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if shrunk is not None and any(id(param) in known for param in _params_of(optimizer)):
            shrunk.shrink()

    if shrunk is not None:
        shrunk.begin(replica.model)
    with _HOOKS.calling(before_step, after_step):
        yield record
        if shrunk is not None:
            shrunk.restore()
            shrunk.unprune(replica.views(start))
