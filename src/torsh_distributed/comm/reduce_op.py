"""The reductions, by the names users type, and what each means to c10d."""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.distributed as dist
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument

_ALIASES = {"avg": "mean", "average": "mean", "prod": "product"}


class ReduceOp(StrEnum):
    """How values of several ranks become one."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    MEAN = "mean"

    # Enum's own hash is a Python function, and every collective looks an op up by its hash.
    __hash__ = str.__hash__

    @classmethod
    @override
    def _missing_(cls, value: object) -> ReduceOp | None:
        name = str(value).lower()
        name = _ALIASES.get(name, name)
        return next((op for op in cls if op.value == name), None)

    @classmethod
    def parse(cls, value: ReduceOp | str) -> ReduceOp:
        """The op of that name (`avg`, `average` and `prod` are accepted too), or InvalidArgument."""
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(op.value for op in cls)
            raise InvalidArgument("unknown reduction", hint=f"use one of: {names}", op=str(value)) from None

    def to_torch(self) -> dist.ReduceOp.RedOpType:
        """The c10d op of the same meaning."""
        name = {"mean": "AVG"}.get(self.value, self.name)
        op: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, name)
        return op

    def check(self, dtype: torch.dtype) -> None:
        """Refuse an op without meaning for the dtype before anything is sent: if one rank fails later, the rest hang.

        A mean of integers is not an integer; bits of a float are not its value; complex numbers have no order.
        """
        is_bits = not dtype.is_floating_point and not dtype.is_complex
        fits = {
            ReduceOp.SUM: True,
            ReduceOp.PRODUCT: True,
            ReduceOp.MIN: not dtype.is_complex,
            ReduceOp.MAX: not dtype.is_complex,
            ReduceOp.MEAN: not is_bits,
        }.get(self, is_bits)
        if not fits:
            raise InvalidArgument(
                f"{self.value} is not defined for {dtype}",
                hint="convert the tensor first, or choose another reduction",
                op=self.value,
                dtype=str(dtype),
            )


def is_integer(dtype: torch.dtype) -> bool:
    """Whether values are whole numbers; bools are not numbers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
