"""The forms in which state is stored: fp32, fp16, bf16, int8 by blocks, lossless.

Note: rounding. An update is often smaller than the spacing of a small form, so nearest rounding would lose it:
parameters are rounded up or down at random, with the right mean. Second moments are stored as their square root, which
halves their range, and int8 rounds that up: a second moment of 0 with a nonzero first moment would make the update
explode. First moments are rounded to nearest.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

Role = Literal["param", "moment", "variance"]
"""What the optimizer uses a value for; it decides the rounding."""

_BLOCK = 256
_LEVEL = 1  # of zlib: higher levels take several times as long and save a few per cent on weights


class Form(ABC):
    """A way to turn fp32 values into bytes and back."""

    name: ClassVar[str]

    dtype: torch.dtype | None = None
    """Set if the bytes are plain numbers of this type, which can be used in place and copied in slices."""

    is_exact: ClassVar[bool] = False

    @abstractmethod
    def num_bytes(self, numel: int) -> int | None:
        """The exact size of that many values; None if it depends on the values."""

    @abstractmethod
    def encode(self, values: Tensor, *, role: Role, generator: torch.Generator) -> Tensor:
        """The bytes of `values` (1-D, fp32, on the host), as a 1-D uint8 tensor."""

    @abstractmethod
    def decode(self, payload: Tensor, numel: int, *, role: Role) -> Tensor:
        """The values of `payload`, 1-D fp32."""


class PlainForm(Form):
    """Numbers of one floating-point type."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name  # type: ignore[misc]  # one class serves three names
        self.dtype: torch.dtype = dtype
        self.is_exact = dtype == torch.float32  # type: ignore[misc]  # likewise

    @override
    def num_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    @override
    def encode(self, values: Tensor, *, role: Role, generator: torch.Generator) -> Tensor:
        if role == "variance" and not self.is_exact:
            values = values.sqrt()
        elif role == "param" and not self.is_exact:
            values = _rounded_at_random(values, self.dtype, generator)
        if self.dtype == torch.float16:
            values = values.clamp(-65504.0, 65504.0)
        return values.to(self.dtype).view(torch.uint8)

    @override
    def decode(self, payload: Tensor, numel: int, *, role: Role) -> Tensor:
        values = payload.view(self.dtype).float()
        return values.square() if role == "variance" and not self.is_exact else values


class BlockInt8Form(Form):
    """8 bits per value, relative to the largest magnitude of its block of 256. Bytes: the codes, then fp32 scales."""

    name = "int8"

    @override
    def num_bytes(self, numel: int) -> int:
        return self._scales_start(numel) + 4 * -(-numel // _BLOCK)

    @override
    def encode(self, values: Tensor, *, role: Role, generator: torch.Generator) -> Tensor:
        numel = values.numel()
        held = values.sqrt() if role == "variance" else values
        blocks = torch.nn.functional.pad(held, (0, -numel % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        steps = blocks / scales.where(scales > 0, 1.0)
        if role == "param":
            steps = (steps + torch.rand(steps.shape, generator=generator)).floor()
        else:
            steps = steps.ceil() if role == "variance" else steps.round()
        payload = torch.zeros(self.num_bytes(numel), dtype=torch.uint8)
        payload[:numel] = steps.clamp(-127, 127).to(torch.int8).flatten()[:numel].view(torch.uint8)
        payload[self._scales_start(numel) :] = scales.flatten().view(torch.uint8)
        return payload

    @override
    def decode(self, payload: Tensor, numel: int, *, role: Role) -> Tensor:
        codes = payload[:numel].view(torch.int8).float()
        scales = payload[self._scales_start(numel) :].view(torch.float32)
        values = codes * scales.repeat_interleave(_BLOCK)[:numel]
        return values.square() if role == "variance" else values

    def _scales_start(self, numel: int) -> int:
        return -(-numel // 4) * 4  # fp32 scales must start at a multiple of 4 bytes


class LosslessForm(Form):
    """fp32, deflated after grouping bytes by position: signs and exponents repeat, mantissas do not."""

    name = "lossless"
    is_exact = True

    @override
    def num_bytes(self, numel: int) -> None:
        return None

    @override
    def encode(self, values: Tensor, *, role: Role, generator: torch.Generator) -> Tensor:
        planes = values.contiguous().view(torch.uint8).view(-1, 4).t().contiguous()
        return torch.frombuffer(bytearray(zlib.compress(planes.numpy().data, _LEVEL)), dtype=torch.uint8)

    @override
    def decode(self, payload: Tensor, numel: int, *, role: Role) -> Tensor:
        planes = torch.frombuffer(bytearray(zlib.decompress(payload.numpy().data)), dtype=torch.uint8)
        return planes.view(4, numel).t().flatten().view(torch.float32)


FP32 = PlainForm("fp32", torch.float32)
FP16 = PlainForm("fp16", torch.float16)
BF16 = PlainForm("bf16", torch.bfloat16)
INT8 = BlockInt8Form()
LOSSLESS = LosslessForm()

FORMS: dict[str, Form] = {"none": FP32, "fp16": FP16, "bf16": BF16, "int8": INT8, "lossless": LOSSLESS}
"""By the names of `offload.cpu_compression`."""


def smaller_form(form: Form) -> Form | None:
    """The next smaller form, for use under memory pressure; None if there is none."""
    return {"fp32": BF16, "lossless": BF16, "fp16": INT8, "bf16": INT8}.get(form.name)


def plain_form(dtype: torch.dtype) -> Form:
    """The form whose bytes are numbers of `dtype`."""
    return {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}[dtype]


def _rounded_at_random(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round to values that `dtype` holds exactly, up or down at random so the mean is right; returns fp32.

    A random number is added to the low bits that the small type drops, then they are cut: the carry rounds up.
    """
    dropped = 16 if dtype == torch.bfloat16 else 13
    noise = torch.randint(0, 1 << dropped, values.shape, dtype=torch.int32, generator=generator)
    bits = values.contiguous().view(torch.int32) + noise
    rounded = (bits & -(1 << dropped)).view(torch.float32)
    # The carry could turn the bits of nan or infinity into another value.
    return torch.where(values.isfinite(), rounded, values)
