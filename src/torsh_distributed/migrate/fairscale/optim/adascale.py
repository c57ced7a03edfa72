"""FairScale's AdaScale: a learning rate that grows with the batch as far as the noise of gradients allows.

After Johnson et al., "AdaScale SGD" (2020). Each backward gives the squared norms of the ranks' own gradients and of
their mean; from both follow the variance of a gradient and the square of the true one, and from these the gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.fairscale.optim.oss import OSS

_STATE = "adascale"
_LEAST_VARIANCE = 1e-6


class AdaScale(Optimizer):
    """Multiplies the learning rate of each step by the gain, between 1 and `scale`; wraps a whole optimizer.

    Every rank builds one. `scale` says how many times larger the batch is than the one the learning rate was chosen
    for; by default ranks × accumulated passes. Count progress with `step += optimizer.gain()`: one step at gain 2 does
    the work of two. Works on gradients that are averaged by backward: under DistributedDataParallel, and with an OSS
    inside under ShardedDataParallel too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
    ) -> None:
        self._hooks: list[RemovableHandle] = []
        self._optimizer = optimizer
        self._world_size = world_size or (dist.get_world_size() if dist.is_initialized() else 1)
        self._is_scaled_loss = is_scaled_loss
        self._debias_ewma = debias_ewma
        self._squares: Tensor | None = None
        """Squared norms of this rank's gradients by group; None outside of backward."""
        self._num_passes = 0
        self._is_queued = False
        self._smoothing = 0.0
        self.set_num_gradients_to_accumulate(num_gradients_to_accumulate)
        if smoothing is not None:
            self._smoothing = smoothing
        if self._num_gradients <= 1:
            raise RuntimeError(
                "AdaScale does not support a single worker without grad accumulation: it compares gradients. Start two "
                "ranks, or set num_gradients_to_accumulate"
            )
        num_groups = len(optimizer.param_groups)
        beside: Any = self._optimizer.state  # Any: a name among the parameters, so that state_dict() has it
        beside.setdefault(
            _STATE,
            {
                "grad_sqr_avg": torch.ones(num_groups, dtype=torch.float64),
                "grad_var_avg": torch.zeros(num_groups, dtype=torch.float64),
            },
        )
        self._scale = float(self._num_gradients)
        self.set_scale(self._num_gradients if scale is None else scale, update_estimate=False)
        self._watch()

    # --- what a training loop asks ------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """How many times larger the batch is than the one the learning rate was chosen for."""
        return self._scale

    @property
    def smoothing(self) -> float:
        """The weight of the past in the running means."""
        return self._smoothing

    def gain(self, pg_idx: int | None = None) -> float:
        """The factor of the learning rate, for one group or for all together."""
        variance, square = self._averages["grad_var_avg"], self._averages["grad_sqr_avg"]
        var = float(variance.sum() if pg_idx is None else variance[pg_idx])
        sqr = float(square.sum() if pg_idx is None else square[pg_idx])
        return (var + sqr) / (var / self._scale + sqr)

    def set_scale(self, scale: float, update_estimate: bool = True) -> None:
        """Change the scale between steps; the estimate of the variance follows unless told otherwise."""
        self._require_no_backward("change the scale")
        if scale < 1:
            raise InvalidArgument("AdaScale's scale is at least 1", scale=scale)
        if update_estimate:
            for name in ("grad_var_avg", "grad_var_avg_biased", "grad_var_avg_total"):
                if name in self._averages:
                    self._averages[name] = self._averages[name] * (self._scale / scale)
        self._scale = float(scale)

    def set_num_gradients_to_accumulate(self, num_gradients_to_accumulate: int, update_smoothing: bool = True) -> None:
        """Change the number of passes before a step; the smoothing follows unless told otherwise."""
        self._require_no_backward("change the number of passes")
        if num_gradients_to_accumulate < 1:
            raise InvalidArgument(
                "num_gradients_to_accumulate is at least 1", num_gradients_to_accumulate=num_gradients_to_accumulate
            )
        self._num_to_accumulate = num_gradients_to_accumulate
        if update_smoothing:
            self._smoothing = max(1 - self._num_gradients / 1000, 0.0)

    def scale_grad_by_num_grads_to_accum(self) -> None:
        """Divide accumulated gradients by the number of passes, if the loss of each pass was not."""
        self._require_no_backward("scale gradients")
        if self._is_scaled_loss or self._num_to_accumulate == 1:
            raise InvalidArgument(
                "these gradients are means already",
                hint="call it only with is_scaled_loss=False and several passes",
            )
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(self._num_to_accumulate)

    # --- an optimizer -------------------------------------------------------------------------------------------

    @property
    @override
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # the wrapped optimizer's, always
        """The groups of the wrapped optimizer, for schedulers."""
        return self._optimizer.param_groups

    @property
    @override
    def state(self) -> Any:  # type: ignore[override]  # the wrapped optimizer's, always
        """The state of the wrapped optimizer."""
        return self._optimizer.state

    @override
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of the wrapped optimizer, with the gain of each group in its learning rate."""
        self._require_no_backward("step")
        rates = [group["lr"] for group in self.param_groups]
        for index, group in enumerate(self.param_groups):
            group["lr"] = rates[index] * self.gain(index)
        try:
            return self._optimizer.step(*args, **kwargs)
        finally:
            for rate, group in zip(rates, self.param_groups, strict=True):
                group["lr"] = rate

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._require_no_backward("clear gradients")
        self._optimizer.zero_grad(set_to_none=set_to_none)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with the running means in it."""
        self._require_no_backward("save")
        return self._optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or FairScale's, whose running means are numpy arrays."""
        self._require_no_backward("load")
        self._optimizer.load_state_dict(state_dict)
        averages = self._averages
        for name, value in averages.items():
            averages[name] = torch.as_tensor(value, dtype=torch.float64).clone()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its running means begin now."""
        self._require_no_backward("add a group")
        self._optimizer.add_param_group(param_group)
        for name, value in self._averages.items():
            if not name.endswith("_count"):
                first = torch.ones(1) if name == "grad_sqr_avg" else torch.zeros(1)
                self._averages[name] = torch.cat([value, first.to(torch.float64)])
        self.unhook()
        self._watch()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped optimizer, too."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # --- gradients ----------------------------------------------------------------------------------------------

    def unhook(self) -> None:
        """Let go of the parameters: their gradients are no longer watched."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch(self) -> None:
        for index, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.requires_grad:
                    self._hooks.append(param.register_hook(partial(self._on_gradient, index)))

    def _on_gradient(self, index: int, grad: Tensor) -> None:
        """A gradient of this rank, before it is averaged."""
        if self._squares is None:
            self._squares = torch.zeros(len(self.param_groups), dtype=torch.float64, device=grad.device)
        self._squares[index] += grad.detach().double().square().sum()
        if not self._is_queued:
            self._is_queued = True
            # DDP averages in a callback of this kind, too, which may come later than this one: so queue once more.
            queue: Callable[..., None] = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._end_pass))

    @torch.no_grad()
    def _end_pass(self) -> None:
        """Gradients are averaged, if this was the last pass before a step."""
        self._is_queued = False
        self._num_passes += 1
        if self._num_passes < self._num_to_accumulate:
            return
        self._num_passes = 0
        assert self._squares is not None, "a gradient has queued this"
        own, self._squares = self._squares, None
        mean = self._squares_of_mean(own.device)
        if self._world_size > 1:
            is_spread = isinstance(self._optimizer, OSS)
            both = torch.cat([own, mean]) if is_spread else own
            all_reduce(both)
            own, mean = (both[: len(own)], both[len(own) :]) if is_spread else (both, mean)
        self._update(own.cpu(), mean.cpu())

    def _squares_of_mean(self, device: torch.device) -> Tensor:
        """Squared norms of the averaged gradients by group; with an OSS of what this rank owns."""
        optimizer = self._optimizer
        groups = optimizer.optim.param_groups if isinstance(optimizer, OSS) else optimizer.param_groups
        found = torch.zeros(len(groups), dtype=torch.float64, device=device)
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param.grad is not None:
                    found[index] += param.grad.detach().double().square().sum()
        return found

    def _update(self, own: Tensor, mean: Tensor) -> None:
        """Own: the sum over all gradients of their squared norms. Mean: the squared norm of their mean."""
        if self._is_scaled_loss:
            own = own * self._num_to_accumulate**2
        else:
            mean = mean / self._num_to_accumulate**2
        count, scale = self._num_gradients, self._scale
        variance = (own / count - mean) * scale / (count - 1)
        square = (mean - variance / scale).clamp_min(0.0)
        self._average("grad_sqr_avg", square)
        self._average("grad_var_avg", variance.clamp_min(_LEAST_VARIANCE))

    def _average(self, name: str, value: Tensor) -> None:
        """A running mean: debiased, or a plain mean that becomes a running one, as the paper has it."""
        averages, weight = self._averages, self._smoothing
        if self._debias_ewma:
            zeros = torch.zeros_like(value)
            biased = weight * averages.get(f"{name}_biased", zeros) + (1 - weight) * value
            unbias = weight * averages.get(f"{name}_unbias", zeros) + (1 - weight)
            averages.update({f"{name}_biased": biased, f"{name}_unbias": unbias, name: biased / unbias})
            return
        count = averages.get(f"{name}_count", torch.zeros(1, dtype=torch.float64)) + 1
        averages[f"{name}_count"] = count
        if float(count) < 1 / (1 - weight):
            total = averages.get(f"{name}_total", torch.zeros_like(value)) + value
            averages.update({f"{name}_total": total, name: total / count})
        else:
            averages[name] = weight * averages[name] + (1 - weight) * value

    @property
    def _averages(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._optimizer.state[_STATE]  # type: ignore[index]  # beside the parameters
        return found

    @property
    def _num_gradients(self) -> int:
        return self._world_size * self._num_to_accumulate

    def _require_no_backward(self, what: str) -> None:
        if self._squares is not None:
            raise InvalidArgument(
                f"AdaScale cannot {what} in the middle of a backward or of an accumulation",
                hint="finish all passes of the step first",
                num_passes=self._num_passes,
                num_gradients_to_accumulate=self._num_to_accumulate,
            )


class AdaScaleWrapper(AdaScale):
    """AdaScale that builds the optimizer it wraps, so that it is constructed like one."""

    def __init__(
        self,
        params: Iterable[Any],
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Any,
    ) -> None:
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            debias_ewma=debias_ewma,
        )
