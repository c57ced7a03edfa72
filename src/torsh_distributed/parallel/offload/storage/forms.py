"""The forms in which state is held: fp32, fp16, bf16, int8 by blocks, lossless. What is stored has that many bytes.

Note: rounding. A parameter moves by less than the step of a small form, so nearest rounding would never move it:
parameters are rounded up or down at random, right on average. Second moments are held as their square root, which
halves their range, and int8 rounds that up: a second moment of 0 under a first moment that is not would blow up the
update. First moments are rounded to nearest.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

Role = Literal["param", "moment", "variance"]
"""What a value is to the optimizer; it decides how it is rounded."""

_BLOCK = 256
_LEVEL = 1  # of zlib: higher levels cost several times as long for a few per cent on weights


class Form(ABC):
    """A way to turn fp32 values into bytes and back."""

    name: ClassVar[str]

    dtype: torch.dtype | None = None
    """Set where the bytes are plain numbers of this type, so that they can be used in place and copied in slices."""

    is_exact: ClassVar[bool] = False

    @abstractmethod
    def num_bytes(self, numel: int) -> int | None:
        """The exact size for that many values; None where the values decide it."""

    @abstractmethod
    def encode(self, values: Tensor, *, role: Role, generator: torch.Generator) -> Tensor:
        """The bytes of `values` (1-D, fp32, on the host), as a 1-D uint8 tensor."""

    @abstractmethod
    def decode(self, payload: Tensor, numel: int, *, role: Role) -> Tensor:
        """The values that `payload` says, 1-D fp32."""


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
    """8 bits a value, relative to the largest magnitude of its block of 256. Bytes: the codes, then fp32 scales."""

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
        return -(-numel // 4) * 4  # fp32 scales must lie on a multiple of 4 bytes


class LosslessForm(Form):
    """fp32, deflated after sorting bytes by their place in the number: signs and exponents repeat, mantissas do not."""

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
    """The next smaller form to change to under memory pressure; None at the end."""
    return {"fp32": BF16, "lossless": BF16, "fp16": INT8, "bf16": INT8}.get(form.name)


def plain_form(dtype: torch.dtype) -> Form:
    """The form whose bytes are numbers of `dtype`."""
    return {torch.float32: FP32, torch.float16: FP16, torch.bfloat16: BF16}[dtype]


def _rounded_at_random(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """fp32 values that `dtype` holds exactly, each up or down with the chance that makes it right on average.

    The low bits that the small type drops get a random number added, then are cut: the carry is the rounding up.
    """
    dropped = 16 if dtype == torch.bfloat16 else 13
    noise = torch.randint(0, 1 << dropped, values.shape, dtype=torch.int32, generator=generator)
    bits = values.contiguous().view(torch.int32) + noise
    rounded = (bits & -(1 << dropped)).view(torch.float32)
    # A value that is no number must stay so; the carry could turn its bits into another one.
    return torch.where(values.isfinite(), rounded, values)
