"""The codes of operations, dtypes, reductions and outcomes in the shared-memory cores."""

from __future__ import annotations

from enum import IntEnum

import torch

from torsh_distributed.comm.reduce_op import ReduceOp


class Status(IntEnum):
    """How a call to a core ended; as in `core.h`."""

    OK = 0
    TIMEOUT = 1
    DEAD = 2
    LEFT = 3
    POISONED = 4
    MISMATCH = 5
    INTERRUPTED = 6
    NO_MEMORY = 7
    OVERFLOW = 8
    ABORTED = 9


OPERATIONS = {
    1: "barrier",
    2: "all_reduce",
    3: "reduce",
    4: "broadcast",
    5: "all_gather",
    6: "gather",
    7: "scatter",
    8: "reduce_scatter",
    9: "all_to_all",
}

REDUCTIONS = {
    ReduceOp.SUM: 0,
    ReduceOp.MEAN: 1,
    ReduceOp.PRODUCT: 2,
    ReduceOp.MIN: 3,
    ReduceOp.MAX: 4,
    ReduceOp.BAND: 5,
    ReduceOp.BOR: 6,
    ReduceOp.BXOR: 7,
}

_FLOATING = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_INTEGER = {
    torch.int8: 4,
    torch.uint8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
    torch.uint16: 9,
    torch.uint32: 10,
    torch.uint64: 11,
}

DTYPES = {
    **_FLOATING,
    **_INTEGER,
    torch.bool: 12,
    torch.complex64: 13,
    torch.complex128: 14,
    torch.complex32: 15,
    torch.float8_e4m3fn: 16,
    torch.float8_e5m2: 17,
    torch.float8_e4m3fnuz: 18,
    torch.float8_e5m2fnuz: 19,
}
"""Every dtype with a code; those from 12 on are copied but never folded under their own code."""

OTHER_DTYPE = 255
"""Any dtype without a code: it is sent too, and only its size is compared across ranks."""

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

FOLDS: dict[tuple[ReduceOp, torch.dtype], tuple[int, int]] = {
    **{
        (op, dtype): (code, REDUCTIONS[op])
        for dtype, code in _FLOATING.items()
        for op in ReduceOp
        if op not in _BITWISE
    },
    **{
        (op, dtype): (code, REDUCTIONS[op])
        for dtype, code in _INTEGER.items()
        for op in ReduceOp
        if op is not ReduceOp.MEAN
    },
    **{(op, torch.bool): (_INTEGER[torch.uint8], REDUCTIONS[op]) for op in _BITWISE},
}
"""What the cores fold: the codes of dtype and reduction. Bools fold as bytes, bitwise."""


def describe_signature(signature: tuple[int, int, int, int, int]) -> str:
    """What a rank was called with, as text: `all_reduce of 1024 bytes of float32, sum`."""
    operation, dtype, reduction, root, num_bytes = signature
    text = OPERATIONS.get(operation, f"operation {operation}")
    if text == "barrier":
        return text
    names = {code: str(kind).removeprefix("torch.") for kind, code in DTYPES.items()}
    text += f" of {num_bytes} bytes of {names.get(dtype, 'another dtype')}"
    if text.startswith(("all_reduce", "reduce")):
        text += ", " + next(op.value for op, code in REDUCTIONS.items() if code == reduction)
    return text + (f", root {root}" if root >= 0 else "")
