"""DeepSpeed's classes of optimizers, for `isinstance(engine.optimizer, DeepSpeedZeroOptimizer)`; and untested ones.

The engine trains with an optimizer of torch, over shards and fp32 copies. What it stands for is a mark on it, which
these classes look at.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.ops import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, FusedAdam, FusedLion
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings

_MARK = "_stands_for"


def mark_optimizer(optimizer: Optimizer, settings: RunSettings) -> None:
    """Say for which stage and number format an engine's optimizer works."""
    setattr(optimizer, _MARK, (settings.stage, settings.dtype))


class _Kind(type):
    """Instances of such a class are the optimizers of engines whose stage and format it names."""

    stages: tuple[int, ...]
    dtype: torch.dtype | None

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        stage, dtype = getattr(instance, _MARK, (None, None))
        return stage in cls.stages and cls.dtype in (None, dtype)

    @override
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise FeatureNotAvailable(
            f"{cls.__name__} cannot be made by hand", hint="deepspeed.initialize gives the engine its optimizer"
        )


class ZeROOptimizer(metaclass=_Kind):
    """Stages 1 to 3."""

    stages: ClassVar[tuple[int, ...]] = (1, 2, 3)
    dtype: ClassVar[torch.dtype | None] = None


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    stages = (1, 2)


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """Stage 3."""

    stages = (3,)


class BF16_Optimizer(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """bf16 without ZeRO."""

    stages, dtype = (0,), torch.bfloat16


class FP16_Optimizer(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """fp16 without ZeRO."""

    stages, dtype = (0,), torch.float16


class FP16_UnfusedOptimizer(ZeROOptimizer):  # noqa: N801 (DeepSpeed's name)
    """fp16 without ZeRO, for optimizers of another kind than Adam: there is one way here, `FP16_Optimizer`."""

    stages = ()


class ZeRORuntimeException(Exception):
    """What DeepSpeed raises for a checkpoint of another layout; ours loads under any."""


ZERO_SUPPORTED_OPTIMIZERS: list[type[Optimizer]] = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    FusedAdam,
    FusedLion,
    DeepSpeedCPUAdam,
    DeepSpeedCPUAdagrad,
]
"""Optimizers that DeepSpeed has tried under ZeRO."""


def is_zero_supported_optimizer(optimizer: Optimizer) -> bool:
    """Whether DeepSpeed has tried this class of optimizer under ZeRO."""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


def refuse_untested(optimizer: Optimizer, settings: RunSettings) -> None:
    """An optimizer that DeepSpeed has not tried is refused if the config says so; here it works unless it does."""
    require(
        settings.stage == 0
        or settings.config.get("zero_allow_untested_optimizer", True)
        or is_zero_supported_optimizer(optimizer),
        'You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true> in the'
        " configuration file to use it.",
        optimizer=type(optimizer).__name__,
    )
