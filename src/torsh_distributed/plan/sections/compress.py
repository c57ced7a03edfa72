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


_SHARE = MethodParameter("share of the elements that is sent", 0.1, 1e-6, 1.0)

METHODS: dict[str, MethodParameter | None] = {
    "none": None,
    "auto": None,
    "fp16": None,
    "bf16": None,
    "int8": MethodParameter("elements that share a scale", 256, 8, 65536, integer=True),
    "nbit": MethodParameter("bits for each element", 8, 1, 8, integer=True),
    "sign": None,
    "majority": None,
    "ternary": MethodParameter(
        "magnitude, relative to the largest, below which 0 is sent; 0 draws at random, without bias", 0.5, 0.0, 1.0
    ),
    "bimodal": MethodParameter("entries of the codebook", 16, 2, 256, integer=True),
    "natural": None,
    "topk": _SHARE,
    "randomk": _SHARE,
    "threshold": MethodParameter("smallest magnitude that is sent", 0.01, 0.0, 1e30),
    "bernoulli": _SHARE,
    "gaussian": MethodParameter("standard deviations from the mean at which an element is sent", 2.0, 0.0, 10.0),
    "sketch": MethodParameter("columns of the sketch", 10000, 1, 2**31, integer=True),
    "powersgd": MethodParameter("rank of the factors", 4, 1, 1024, integer=True),
    "layerwise": _SHARE,
}
"""Every method, with the parameter it takes."""

NEEDS_WHOLE_GRADIENTS = ("powersgd", "sketch")
"""Methods whose messages describe a tensor as a whole: they cannot be cut by the owner of a shard."""


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
        wanted = METHODS[self.name]
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
        wanted = METHODS[name]
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
