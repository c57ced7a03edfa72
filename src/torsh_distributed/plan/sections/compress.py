"""How gradients are made smaller before they travel: the `compress` section of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from torsh_distributed.plan.describing.allowed import Allowed
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


_SHARE = MethodParameter("share of the elements that travels", 0.1, 1e-6, 1.0)

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
        "magnitude, relative to the largest, below which 0 travels; 0 draws at random, without bias", 0.5, 0.0, 1.0
    ),
    "bimodal": MethodParameter("entries of the codebook", 16, 2, 256, integer=True),
    "natural": None,
    "topk": _SHARE,
    "randomk": _SHARE,
    "threshold": MethodParameter("magnitude from which on an element travels", 0.01, 0.0, 1e30),
    "bernoulli": _SHARE,
    "gaussian": MethodParameter("standard deviations from which on an element travels", 2.0, 0.0, 10.0),
    "sketch": MethodParameter("columns of the sketch", 10000, 1, 2**31, integer=True),
    "powersgd": MethodParameter("rank of the factors", 4, 1, 1024, integer=True),
    "layerwise": _SHARE,
}
"""Every method, with the parameter it takes."""

NEEDS_WHOLE_GRADIENTS = ("powersgd", "sketch")
"""Methods whose messages describe a tensor as a whole: they cannot be cut by the owner of a shard."""


class CompressConfig(Section):
    """The method, and what keeps its error from adding up."""

    method: Annotated[str, Allowed("a method, or method:number such as topk:0.01 or powersgd:4")] = "none"
    """What is sent in place of the gradient. `auto` measures the link and chooses, no compression included."""

    error_feedback: Literal["none", "ef14", "ef21"] = "ef14"
    """Add what compression left out to the next gradient (ef14), or send compressed differences (ef21)."""

    error_feedback_momentum: float = Field(default=0.9, ge=0, le=1)
    """How much of what was left out is carried over; 1 carries all of it."""

    ef21_momentum: float = Field(default=0, ge=0, lt=1)
    """Under ef21, how much of its earlier gradients a rank keeps in the one it tells of: differences are then less of
    each batch's noise. 0 tells of every gradient as it is; 0.5 suits sparse methods."""

    warmup_steps: int = Field(default=100, ge=0)
    """Steps at the start that travel uncompressed: early gradients change fast."""

    period: int = Field(default=1, ge=1)
    """Compress one step in this many."""

    skip_below_numel: int = Field(default=1024, ge=0)
    """Tensors with fewer elements travel as they are: they would save little."""

    skip_names: Words = ()
    """Patterns of parameter names that travel as they are."""

    @property
    def name(self) -> str:
        """The method without its parameter."""
        return self.method.partition(":")[0]

    @property
    def parameter(self) -> float | None:
        """The method's parameter, given or by default; None for a method without one."""
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
            yield Problem("method", f"method {name!r} is unknown", did_you_mean(name, METHODS) or known)
            return
        wanted = METHODS[name]
        if wanted is None:
            if colon:
                yield Problem("method", f"method {name} takes no number; got {self.method!r}", f'write "{name}"')
        elif colon and not _fits(given, wanted):
            kind = "an integer" if wanted.integer else "a number"
            yield Problem(
                "method",
                f"method {self.method!r}: after the colon goes {kind} from {wanted.least:g} to {wanted.most:g}"
                f" ({wanted.meaning})",
                f'the default is "{name}:{wanted.default:g}"',
            )
        elif name == "nbit" and self.parameter == 1 and self.error_feedback != "none":
            yield Problem(
                "method",
                f"method nbit:1 with error_feedback {self.error_feedback!r} diverges: a message drawn between two"
                " levels is further from the gradient than nothing is, so what is left out grows from step to step",
                'use "sign" for one bit with error feedback, "nbit:2", or error_feedback = "none"',
            )


def _fits(given: str, wanted: MethodParameter) -> bool:
    try:
        number = float(given)
    except ValueError:
        return False
    return wanted.least <= number <= wanted.most and (number.is_integer() or not wanted.integer)
