"""DeepSpeed's loss scales: a fixed one, the dynamic one of ZeRO, and the dynamic one without ZeRO.

All count every step, also skipped ones, and double the scale after `scale_window` steps without an overflow. They
differ in what an overflow does, which is why torch's GradScaler replaces neither.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from torsh_distributed.errors import InvalidArgument, NonFiniteLoss

_log = logging.getLogger(__name__)

FACTOR = 2.0
"""How much a dynamic scale changes at once."""


class LossScaler:
    """A fixed scale: a step whose gradients overflow is skipped, the scale stays."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = float(scale)
        self.cur_iter = 0

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss."""
        return self.cur_scale

    def scale_loss(self, loss: Any) -> Any:
        """The loss to call backward on."""
        return loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """After every step: whether its gradients overflowed."""
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """What the next scales depend on."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; a state of another kind of scale gives its present value alone."""
        own = vars(self)
        own.update({name: value for name, value in state.items() if name in own} if state.keys() >= own.keys() else {})
        self.cur_scale = float(state.get("cur_scale", self.cur_scale)) if self.dynamic else self.cur_scale


class _GrowingScaler(LossScaler):
    """What both dynamic scales share: they grow after steps without an overflow."""

    dynamic = True

    def __init__(self, init_scale: float, scale_window: int, min_scale: float) -> None:
        super().__init__(init_scale)
        self.last_overflow_iter = -1
        self.scale_factor = FACTOR
        self.scale_window = scale_window
        self.min_scale = float(min_scale)

    @override
    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self._shrink()
            self.last_overflow_iter = self.cur_iter
        else:
            num_stable = self.cur_iter - self.last_overflow_iter - 1
            self._pass(grows=num_stable > 0 and num_stable % self.scale_window == 0)
        self.cur_iter += 1

    def _shrink(self) -> None:
        lower = max(self.cur_scale / self.scale_factor, self.min_scale)
        _log.info(
            "gradients overflow at a loss scale of %g: the step is skipped, the scale is now %g", self.cur_scale, lower
        )
        self.cur_scale = lower

    def _pass(self, *, grows: bool) -> None:
        if grows:
            self.cur_scale *= self.scale_factor


class DynamicLossScaler(_GrowingScaler):
    """The scale of ZeRO: an overflow first uses up the hysteresis, only then is the scale halved.

    Growth refills the hysteresis, or every good step with `consecutive_hysteresis`. An overflow at the minimum ends the
    run, unless `raise_error_at_min_scale` is off.
    """

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: Any = None,
    ) -> None:
        super().__init__(init_scale, scale_window, min_scale)
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale

    @override
    def _shrink(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            _log.info("gradients overflow: the step is skipped, the hysteresis is now %d", self.cur_hysteresis)
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise NonFiniteLoss(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
                hint="lower the learning rate, or use bf16, which has the range of fp32",
                loss_scale=self.cur_scale,
            )
        super()._shrink()

    @override
    def _pass(self, *, grows: bool) -> None:
        if grows or self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        super()._pass(grows=grows)


class PlainDynamicScaler(_GrowingScaler):
    """The scale without ZeRO (stage 0): every overflow halves it at once, and at the minimum it stays."""


def make_scaler(fp16: Mapping[str, Any], *, is_zero: bool) -> LossScaler:
    """The scale that a config's `fp16` section asks for; a section that is not enabled gets a scale of 1."""
    if not fp16.get("enabled", False):
        return LossScaler(1.0)
    fixed = fp16.get("loss_scale", 0)
    if fixed:
        return LossScaler(float(fixed))
    window, least = int(fp16.get("loss_scale_window", 1000)), float(fp16.get("min_loss_scale", 1))
    if window < 1 or least <= 0:
        raise InvalidArgument(
            "fp16.loss_scale_window and fp16.min_loss_scale must be above 0",
            loss_scale_window=window,
            min_loss_scale=least,
        )
    first = FACTOR ** int(fp16.get("initial_scale_power", 16))
    if not is_zero:
        return PlainDynamicScaler(first, window, least)
    return DynamicLossScaler(
        first,
        window,
        least,
        int(fp16.get("hysteresis", 2)),
        bool(fp16.get("consecutive_hysteresis", False)),
    )


def CreateLossScaler(  # noqa: N802 (DeepSpeed's name)
    dtype: Any, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScaler:
    """DeepSpeed's own function: only fp16 is scaled."""
    if "16" in str(dtype) and "bfloat" not in str(dtype):
        if dynamic_scaling:
            if dynamic_loss_args is None:
                raise InvalidArgument("Dynamic loss scaling parameters must be defined.")
            return DynamicLossScaler(**dynamic_loss_args)
        return LossScaler(static_loss_scale)
    return LossScaler(1.0)
