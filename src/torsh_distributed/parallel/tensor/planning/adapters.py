"""Layers under an adapter (PEFT's LoRA): the layer is split as planned, and its two small ones so the sum still fits.

An adapter computes `base_layer(x) + lora_B(lora_A(x))`. Under a layer split by output features `lora_A` is whole and
`lora_B` is split alike; under one split by input features `lora_A` is split alike, its result summed, and `lora_B` is
whole. Gradients are then right as they are: each of these layers completes what it takes or returns.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.tensor.planning.planned_rows import SplitStyle
from torsh_distributed.plan.sections.mesh import TensorConfig

BASE = "base_layer"
_PART = re.compile(rf"(?P<layer>.+)\.(?:(?P<base>{BASE})|(?P<lora>lora_[AB])\.[^.]+)")
_COLUMNS = (
    SplitStyle.COLUMN_LOCAL,
    SplitStyle.COLUMN_GATHERED,
    SplitStyle.COLUMN_PACKED,
    SplitStyle.KEY_VALUE,
)
_ROWS = (SplitStyle.ROW, SplitStyle.ROW_PACKED)


def is_adapted(module: nn.Module) -> bool:
    """Whether a module stands in the place of a layer that it holds, and adds to its result."""
    return isinstance(getattr(module, BASE, None), nn.Module)


def adapted_layer(name: str) -> str | None:
    """The layer that a module belongs to, as its base or a part of its adapter; None for other names."""
    found = _PART.fullmatch(name)
    return None if found is None else found["layer"]


def part_style(name: str, style: SplitStyle | None) -> SplitStyle | None:
    """The style of a part of an adapted layer whose own style is `style`; None where it stays whole."""
    found = _PART.fullmatch(name)
    if found is None or style is None:
        return None
    if found["base"]:
        return style
    return style if style in {"lora_A": _ROWS, "lora_B": _COLUMNS}[found["lora"]] else None


def split_parts(name: str, module: nn.Module) -> list[str]:
    """What is split in place of a layer that is split by output features: the layer, or its base and `lora_B`."""
    if not is_adapted(module):
        return [name]
    ups: Any = getattr(module, "lora_B", {})
    return [f"{name}.{BASE}", *(f"{name}.lora_B.{adapter}" for adapter in ups)]


def check_adapter(name: str, module: nn.Module, style: SplitStyle, config: TensorConfig) -> None:
    """Refuse adapters of which not every part is known, on a layer that is split; ConfigurationError says which."""
    kind = type(module).__name__
    hint = f"leave the layer whole: tensor.overrides {name}=replicated"
    others = [one for one, _ in module.named_parameters() if not one.startswith((f"{BASE}.", "lora_A.", "lora_B."))]
    if others or style not in (*_COLUMNS, *_ROWS):
        what = f"has {others[0]}" if others else f"is to be split as {style.value!r}"
        raise ConfigurationError(
            f"{name}: the adapter ({kind}) {what}, and mesh.tp knows LoRA of linear layers only", hint=hint
        )
    dropped = [one.p for one in module.modules() if isinstance(one, nn.Dropout) and one.p > 0]
    if dropped:
        raise ConfigurationError(
            f"{name}: the adapter has dropout {dropped[0]:g}, and ranks along mesh.tp would drop different elements of"
            " the same input",
            hint="set lora_dropout = 0",
        )
    if config.sequence_parallel:
        raise ConfigurationError(
            f"{name}: tensor.sequence_parallel does not support adapters, which take whole sequences",
            hint="set tensor.sequence_parallel = false",
        )
