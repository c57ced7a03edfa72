"""What a user reads when a split model computes something else than the whole one: where, and what to write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.structural_plan import generic_name
from torsh_distributed.plan import Plan


@dataclass(frozen=True)
class Difference:
    """What differs from one process."""

    kind: Literal["loss", "gradient", "mixed", "reads", "module", "failed"]
    name: str = ""
    """Of a parameter or a module; empty: the model itself."""
    said: str = ""
    """The error, or the class of the module."""
    found: float = 0.0
    expected: float = 0.0
    is_leaf: bool = False
    """Whether the module has no others inside."""


def refusal(kind: str, plan: Plan, difference: Difference) -> ConfigurationError:
    """The error for a model of class `kind`."""
    degrees = {name: degree for name, degree in plan.mesh.degrees.items() if name in _AXES and degree > 1}
    axes = ", ".join(f"mesh.{name} {degree}" for name, degree in degrees.items())
    one = " and ".join(f"mesh.{name} = 1" for name in degrees)
    where = f"{difference.name} ({difference.said})" if difference.name else f"the forward of {kind}"
    if difference.kind == "reads":
        return ConfigurationError(
            f"the loss reads {difference.name}, of which a rank holds a part only under {axes}",
            hint=f"let the optimizer decay weights (weight_decay=…) instead of the loss; or set {one}",
        )
    if difference.kind == "failed":
        place = difference.name or "its forward"
        return ConfigurationError(
            f"{kind} cannot run on {axes}, but can in one process: {place} says {difference.said}",
            hint=_hint(plan, difference.name, one),
        )
    if difference.kind == "module":
        how = " mixes positions in a way that is not known" if plan.mesh.cp > 1 and plan.mesh.tp == 1 else ""
        what = f"{where}{how}" if how else f"{where} is the first to differ"
        name = difference.name.rpartition(".")[0] if difference.is_leaf else difference.name
        return ConfigurationError(f"{_opening(kind, axes)}: {what}", hint=_hint(plan, name, one))
    if difference.kind == "loss":
        over = "positions" if plan.mesh.cp > 1 else "microbatches" if plan.mesh.pp > 1 else None
        reason = f"; a loss must be a mean over {over}" if over is not None else ""
        return ConfigurationError(
            f"{_opening(kind, axes)}: its modules agree, but the loss is {difference.found:.6g} in place of"
            f" {difference.expected:.6g}{reason}",
            hint=f"write it as a mean over the targets that it gets; or set {one}",
        )
    what = "is left in pieces" if difference.kind == "mixed" else "differs"
    owner = difference.name.rpartition(".")[0]
    return ConfigurationError(
        f"{_opening(kind, axes)}: the gradient of {difference.name} {what}", hint=_hint(plan, owner, one)
    )


_AXES = ("tp", "pp", "cp", "ep")


def _opening(kind: str, axes: str) -> str:
    return f"{kind} does not compute on {axes} what it computes in one process"


def _hint(plan: Plan, where: str, one: str) -> str:
    ways = []
    if plan.mesh.tp > 1:
        pattern = f"{generic_name(where)}.*" if where else "*"
        ways.append(f'leave these layers whole, tensor.overrides = ["{pattern}=replicated"]')
    if plan.mesh.cp > 1:
        ways.append("let positions meet in torch.nn.functional.scaled_dot_product_attention(…, is_causal=True) alone")
    ways.append(f"set {one}")
    return "; or ".join(ways)
