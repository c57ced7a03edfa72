"""How gradients are compressed before they are sent: the `compress` section of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.describing import AllowedValues
from torsh_distributed.plan.problems import Problem, did_you_mean
from torsh_distributed.plan.section import Section, Words


@dataclasses.dataclass(frozen=True)
class MethodParameter:
    """The number that follows a method's name after a colon."""

    meaning: str
    default: float
    least: float
    most: float
    integer: bool = False


@dataclasses.dataclass(frozen=True)
class CompressMethod:
    """A way to encode gradients."""

    codec: str | None
    """Its module in `compress.codecs` and the class or factory there, called with the number if there is one; None for
    a choice among codecs. A name: this layer is below, and a codec may need packages that others do not."""
    number: MethodParameter | None = None
    needs_whole_gradients: bool = False
    """Its messages describe a tensor as a whole: they cannot be cut by the owner of a shard."""


_SHARE = MethodParameter("share of the elements that is sent", 0.1, 1e-6, 1.0)

METHODS: dict[str, CompressMethod] = {
    "none": CompressMethod("linear.cast:Fp32Codec"),
    "auto": CompressMethod(None),
    "fp16": CompressMethod("linear.cast:Fp16Codec"),
    "bf16": CompressMethod("linear.cast:Bf16Codec"),
    "int8": CompressMethod(
        "dense.rounding:Int8Codec", MethodParameter("elements that share a scale", 256, 8, 65536, integer=True)
    ),
    "nbit": CompressMethod(
        "dense.rounding:NbitCodec",
        MethodParameter("bits for each element; for 9 to 16 use bf16 or fp16", 8, 1, 8, integer=True),
    ),
    "sign": CompressMethod("dense.sign:SignCodec"),
    "majority": CompressMethod("dense.sign:MajorityCodec"),
    "ternary": CompressMethod(
        "dense.sign:make_ternary",
        MethodParameter(
            "magnitude, relative to the largest, below which 0 is sent; 0 draws at random, without bias", 0.5, 0.0, 1.0
        ),
    ),
    "bimodal": CompressMethod(
        "dense.bimodal:BimodalCodec", MethodParameter("entries of the codebook", 16, 2, 256, integer=True)
    ),
    "natural": CompressMethod("dense.rounding:NaturalCodec"),
    "topk": CompressMethod("sparse.magnitude:TopKCodec", _SHARE),
    "randomk": CompressMethod("sparse.random_choice:RandomKCodec", _SHARE),
    "threshold": CompressMethod(
        "sparse.magnitude:ThresholdCodec", MethodParameter("smallest magnitude that is sent", 0.01, 0.0, 1e30)
    ),
    "bernoulli": CompressMethod("sparse.random_choice:BernoulliCodec", _SHARE),
    "gaussian": CompressMethod(
        "sparse.magnitude:GaussianCodec",
        MethodParameter("standard deviations from the mean at which an element is sent", 2.0, 0.0, 10.0),
    ),
    "sketch": CompressMethod(
        "linear.sketch:SketchCodec",
        MethodParameter("columns of the sketch", 10000, 1, 2**31, integer=True),
        needs_whole_gradients=True,
    ),
    "powersgd": CompressMethod(
        "linear.powersgd:PowerSgdCodec",
        MethodParameter("rank of the factors", 4, 1, 1024, integer=True),
        needs_whole_gradients=True,
    ),
    "layerwise": CompressMethod("sparse.layerwise:LayerwiseCodec", _SHARE),
}
"""Every method. A codec is added by its module and a line here."""


ADAPTABLE = ("topk", "randomk", "bernoulli", "layerwise", "nbit", "powersgd")
"""Methods whose number says how much is sent."""
_GIVE_ONE = f"use one of {', '.join(ADAPTABLE)}"


class CompressConfig(Section):
    """The compression method, and how its error is kept from accumulating."""

    method: Annotated[str, AllowedValues("a method, or method:number such as topk:0.01 or powersgd:4")] = "none"
    """How gradients are encoded. `auto` measures the link and chooses a method, or none."""

    error_feedback: Literal["none", "ef14", "ef21"] = "ef14"
    """Add what compression dropped to the next gradient (ef14), or send compressed differences (ef21)."""

    error_feedback_momentum: float = Field(default=0.9, ge=0, le=1)
    """Under ef14, the share of what was dropped that is carried over; 1 carries all of it."""

    ef21_momentum: float = Field(default=0, ge=0, lt=1)
    """Under ef21, the weight of earlier gradients in the running mean that a rank sends differences of: less noise of
    single batches. 0 uses every gradient as it is; 0.5 suits sparse methods."""

    warmup_steps: int = Field(default=100, ge=0)
    """First steps whose gradients are sent uncompressed, so nothing is saved yet: early gradients change fast. A
    DecisionEvent says when compression sets in."""

    period: int = Field(default=1, ge=1)
    """Compress one step out of this many; the others are sent uncompressed."""

    adapt: Literal["none", "conservative", "aggressive", "loss_aware"] = "none"
    """Change the method's number while training, by how much its messages leave out: every 100 steps by 10 %, or every
    10 steps by 20 %. `loss_aware` goes by the loss: the steadier it is, the less is sent."""

    skip_below_numel: int = Field(default=1024, ge=0)
    """Tensors with fewer elements are sent uncompressed: they would save little."""

    skip_names: Words = ()
    """Patterns of parameter names whose gradients are sent uncompressed."""

    @property
    def name(self) -> str:
        """The method without its parameter."""
        return self.method.partition(":")[0]

    @property
    def parameter(self) -> float | None:
        """The method's parameter, as given or by default; None for a method without one."""
        wanted = METHODS[self.name].number
        if wanted is None:
            return None
        given = self.method.partition(":")[2]
        return float(given) if given else wanted.default

    @override
    def find_problems(self) -> Iterator[Problem]:
        name, colon, given = self.method.partition(":")
        if name not in METHODS:
            known = f"known methods: {', '.join(METHODS)}"
            yield Problem("method", f"compress.method {name!r} is unknown", did_you_mean(name, METHODS) or known)
            return
        wanted = METHODS[name].number
        if self.adapt == "loss_aware" and name in ("none", "auto"):
            yield Problem("adapt", f"compress.adapt loss_aware: {name} is not a method to adapt", _GIVE_ONE)
        elif self.adapt not in ("none", "loss_aware") and name not in ADAPTABLE:
            yield Problem("adapt", f"compress.adapt: {name} has no number for how much is sent", _GIVE_ONE)
        if wanted is None:
            if colon:
                text = f"compress.method {name} takes no number; got {self.method!r}"
                yield Problem("method", text, f'write "{name}"')
        elif colon and not _fits(given, wanted):
            kind = "an integer" if wanted.integer else "a number"
            yield Problem(
                "method",
                f"compress.method {self.method!r}: the colon is followed by {kind} from {wanted.least:g} to"
                f" {wanted.most:g} ({wanted.meaning})",
                f'the default is "{name}:{wanted.default:g}"',
            )
        elif name == "nbit" and self.parameter == 1 and self.error_feedback != "none":
            yield Problem(
                "method",
                f"compress.method nbit:1 with compress.error_feedback {self.error_feedback!r} diverges: a message drawn"
                " between two levels is further from the gradient than zero is, so the error grows from step to step",
                'use "sign" for one bit with error feedback, "nbit:2", or compress.error_feedback = "none"',
            )


def _fits(given: str, wanted: MethodParameter) -> bool:
    try:
        number = float(given)
    except ValueError:
        return False
    return wanted.least <= number <= wanted.most and (number.is_integer() or not wanted.integer)
