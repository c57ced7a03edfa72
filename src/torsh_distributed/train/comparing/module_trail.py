"""What the modules of a model take and return in a forward, in few numbers: to find the first that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torsh_distributed.parallel.context.positions import take_positions
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.torch_internals import tree_leaves

_ROUNDING = 1e-3


class Passage(NamedTuple):
    """A tensor that entered or left a module: its shape, its norm, and its product with fixed numbers."""

    module: str
    is_output: bool
    number: int
    """Of the module's calls."""
    shape: tuple[int, ...]
    norm: float
    product: float


@contextmanager
def trail_of(model: nn.Module, *, cp: int = 1) -> Iterator[list[Passage]]:
    """What passes through the modules of `model` inside, in order.

    `cp`: also what each of so many ranks with a part of the positions would have, right after the whole.
    """
    found: list[Passage] = []
    counts: dict[tuple[str, bool], int] = {}

    def note(name: str, is_output: bool, values: Any) -> None:
        tensor = next((leaf for leaf in tree_leaves(values) if _is_activation(leaf)), None)
        number = counts.get((name, is_output), 0)
        counts[name, is_output] = number + 1
        if tensor is not None:
            whole = whole_of(tensor).detach()
            found.extend(_passage(name, is_output, number, one) for one in (whole, *_parts(whole, cp)))

    handles = []
    for name, module in model.named_modules():
        plain = plain_name(name)
        handles.append(module.register_forward_pre_hook(partial(_taken, note, plain), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(_returned, note, plain)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def first_difference(whole: Sequence[Passage], split: Sequence[Passage]) -> Passage | None:
    """The first tensor of the whole model that a rank has in the same form, but with other values."""
    seen: dict[tuple[Any, ...], list[Passage]] = {}
    for one in split:
        seen.setdefault(one[:4], []).append(one)
    alike: dict[tuple[Any, ...], list[Passage]] = {}
    for one in whole:
        alike.setdefault(one[:4], []).append(one)
    for one in whole:
        # Parts of one shape differ by rank: what a rank has must be one of them.
        for other in seen.get(one[:4], ()):
            if not any(_is_close(other, known) for known in alike[one[:4]]):
                return one
    return None


def _is_close(one: Passage, other: Passage) -> bool:
    limit = _ROUNDING * other.norm + 1e-6
    return abs(one.norm - other.norm) <= limit and abs(one.product - other.product) <= limit


def _passage(name: str, is_output: bool, number: int, tensor: Tensor) -> Passage:
    values = tensor.double().flatten()
    fixed = torch.arange(values.numel(), device=values.device).add_(1).double().mul_(0.7).cos_()
    return Passage(name, is_output, number, tuple(tensor.shape), float(values.norm()), float(values @ fixed))


def _parts(tensor: Tensor, cp: int) -> Iterator[Tensor]:
    for dim, length in enumerate(tensor.shape) if cp > 1 else ():
        if length and length % cp == 0:
            for rank in range(cp):
                yield take_positions(tensor, dim, length=length, rank=rank, size=cp)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _taken(note: Any, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    note(name, False, (args, kwargs))


def _returned(note: Any, name: str, _: nn.Module, __: object, output: Any) -> None:
    note(name, True, output)
