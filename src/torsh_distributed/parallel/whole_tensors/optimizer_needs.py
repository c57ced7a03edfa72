"""What an optimizer must see to update an element: the element alone, its whole tensor, or other tensors too.

Known for torch's own; any other optimizer is tried on small tensors, in pieces and whole, before training.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.optim import CpuAdam
from torsh_distributed.parallel.state.held_tensors import local_part_of

_log = logging.getLogger(__name__)

Needs = Literal["elements", "tensors", "model"]
"""What the update of an element depends on. `model`: on other parameters too, such as a norm over all of them."""

DECLARATION = "torsh_needs"
"""The attribute by which an optimizer, or its class, says what it needs."""

PieceForm = Callable[[Tensor], Tensor]
"""From a small whole tensor to what this rank would hold of it; ranks may communicate in operations on the result."""

_KNOWN: dict[str, Needs] = {
    **dict.fromkeys(
        ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad", "ASGD"), "elements"
    ),
    **dict.fromkeys(("Adafactor", "Muon", "SparseAdam"), "tensors"),
}
"""Of torch.optim. Sparse gradients cannot be cut. Rprop is element-wise, but torch cannot compute it on shards: it is
tried like others."""

_SHAPES = {1: (288,), 2: (288, 160), 3: (8, 48, 32), 4: (16, 16, 3, 3)}
"""To try by number of dims: halves are still above the 128 from which some optimizers factor, and 4096 elements."""

_NUM_STEPS = 6
_RATE = 1e-2
"""While an optimizer is tried: its own rate may be 0 before a warm-up."""


def refuse_closures(optimizer: Optimizer) -> None:
    """Raise InvalidArgument for an optimizer that computes the loss again in its step, as LBFGS does."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        raise InvalidArgument(
            f"{type(optimizer).__name__} needs a closure that computes the loss again, and an Engine computes it once",
            hint="use an optimizer whose step() needs no closure, such as AdamW",
        )


def inner_optimizer(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that this one wraps, if it does: it needs what that one needs."""
    return next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)


def known_needs(optimizer: Optimizer) -> Needs | None:
    """What is known of an optimizer: what it declares (`torsh_needs`), or its class; None if it must be tried."""
    declared = getattr(optimizer, DECLARATION, None)
    if declared is not None:
        if declared not in get_args(Needs):
            raise InvalidArgument(
                f"{type(optimizer).__name__}.{DECLARATION} is not one of {', '.join(get_args(Needs))}", got=declared
            )
        return cast(Needs, declared)
    inner = inner_optimizer(optimizer)
    if inner is not None:
        return known_needs(inner)
    # Torch wraps the step of a class at its first use. One with another step than its class may do anything.
    own = inspect.unwrap(type(optimizer).step)
    for kind in type(optimizer).__mro__:
        if kind is CpuAdam or getattr(torch.optim, kind.__name__, None) is kind:
            is_same = inspect.unwrap(kind.step) is own
            return _KNOWN.get("Adam" if kind is CpuAdam else kind.__name__) if is_same else None
    return None


def tried_needs(optimizer: Optimizer, number: int, forms: Sequence[PieceForm], *, has_all_params: bool) -> Needs | None:
    """What the optimizer needs for a parameter group, found by updating small tensors; None if it cannot be tried.

    Every rank calls this: the pieces of some `forms` are computed on by all of them. `has_all_params`: this rank
    updates parts of all parameters.
    """
    tried = inner_optimizer(optimizer) or optimizer
    group = tried.param_groups[number]
    dims = sorted({param.dim() for param in group["params"]} & _SHAPES.keys())
    if not dims:
        return "elements"
    device = local_part_of(group["params"][0]).device
    with _own_random_numbers(device):
        for dtype in (torch.float64, torch.float32):  # some have kernels for fp32 alone
            trial = _Trial(tried, number, [dim for dim in dims for _ in range(2)], device, dtype)
            try:
                whole = trial.run(lambda tensor: tensor)
                alone = [trial.run(lambda tensor: tensor, only=place)[0] for place in range(len(whole))]
            except Exception as error:
                _log.debug("%s cannot be tried in %s: %s", type(tried).__name__, dtype, error)
                continue
            if not trial.has_moved(whole):
                continue
            is_coupled = not all(map(trial.is_same, whole, alone, trial.moves(whole)))
            are_right = [trial.is_right(form, whole) for form in forms]  # every one: ranks may communicate in them
            if all(are_right) and (has_all_params or not is_coupled):
                return "elements"
            return "model" if is_coupled else "tensors"
    return None


class _Trial:
    """Steps of an optimizer's twin on small tensors."""

    def __init__(
        self, optimizer: Optimizer, number: int, dims: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._optimizer, self._number = optimizer, number
        random = torch.Generator().manual_seed(0)
        self._eps = torch.finfo(dtype).eps
        self._start = [_numbers(_SHAPES[dim], 0.5, 2.0, random).to(device, dtype) for dim in dims]
        self._grads = [
            # They grow where parameters shrink: a ratio of norms differs between pieces.
            [_numbers(_SHAPES[dim], 2.0, 0.5, random).to(device, dtype) for dim in dims]
            for _ in range(_NUM_STEPS)
        ]

    def run(self, form: PieceForm, *, only: int | None = None) -> list[Tensor]:
        """What this rank holds after the steps; of `only` one of the tensors, as if it were the only parameter."""
        chosen = slice(None) if only is None else slice(only, only + 1)
        params = [nn.Parameter(form(one.clone())) for one in self._start[chosen]]
        twin = _twin(self._optimizer, self._number, params)
        for grads in self._grads:
            for param, grad in zip(params, grads[chosen], strict=True):
                param.grad = form(grad.clone())
            twin.step()
        return [local_part_of(param).clone() for param in params]

    def moves(self, whole: Sequence[Tensor]) -> list[float]:
        """How far the steps moved an element of each tensor at most."""
        return [float((one - start).abs().max()) for one, start in zip(whole, self._start, strict=True)]

    def has_moved(self, whole: Sequence[Tensor]) -> bool:
        """Whether the steps changed every tensor to finite numbers: else they say nothing."""
        return all(0 < one < math.inf for one in self.moves(whole))

    def is_right(self, form: PieceForm, whole: Sequence[Tensor]) -> bool:
        """Whether steps on pieces give the pieces of what they give on whole tensors."""
        try:
            found = self.run(form)
        except Exception as error:
            _log.debug("%s cannot update pieces: %s", type(self._optimizer).__name__, error)
            return False
        expected = [local_part_of(form(one)) for one in whole]
        return all(map(self.is_same, expected, found, self.moves(whole)))

    def is_same(self, expected: Tensor, found: Tensor, moved: float) -> bool:
        """Whether two results differ by no more than rounding; `moved` is the size of the update."""
        if not expected.numel():
            return True
        rounding = 4 * self._eps * float(expected.abs().max())
        return float((expected - found).abs().max()) <= 1e-5 * moved + rounding


def _twin(optimizer: Optimizer, number: int, params: list[nn.Parameter]) -> Optimizer:
    """Another optimizer of the same class and settings over other parameters."""
    settings = {
        key: copy.deepcopy(value)
        for key, value in optimizer.param_groups[number].items()
        if key not in ("params", "param_names")
    }
    if "lr" in settings:
        settings["lr"] = torch.full_like(settings["lr"], _RATE) if isinstance(settings["lr"], Tensor) else _RATE
    group = {**settings, "params": params}
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        defaults = {key: copy.deepcopy(value) for key, value in optimizer.defaults.items() if key in accepted}
        made: Optimizer = cast(Any, type(optimizer))([group], **defaults)
    except Exception:
        return _copied(optimizer, group)
    return made


def _copied(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """A copy of an optimizer's attributes, over another group; raises InvalidArgument if these hold parameters."""
    own = {key: value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")}
    if keeps_params(optimizer):
        raise InvalidArgument("the optimizer keeps parameters in its own attributes")
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(
        {key: type(value)() if key.startswith("_optimizer_") else copy.deepcopy(value) for key, value in own.items()}
    )
    made.param_groups, made.state = [group], defaultdict(dict)
    return made


def keeps_params(optimizer: Optimizer) -> bool:
    """Whether an optimizer has parameters in attributes of its own: it does not follow its groups then."""
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    waiting = [value for key, value in vars(optimizer).items() if key not in ("param_groups", "state", "defaults")]
    for _ in range(3):  # lists of lists of tensors
        if any(id(value) in known for value in waiting):
            return True
        waiting = [one for value in waiting for one in _inside(value)]
    return any(id(value) in known for value in waiting)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, (list, tuple, set, frozenset)) else ()


def _numbers(shape: tuple[int, ...], first: float, last: float, random: torch.Generator) -> Tensor:
    """Random numbers whose sizes go from `first` to `last` along every dim."""
    values = torch.randn(shape, generator=random, dtype=torch.float64) / 4
    for dim, size in enumerate(shape):
        values *= torch.linspace(first, last, size).view([-1 if one == dim else 1 for one in range(len(shape))])
    return values


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Around a trial: training draws the same numbers as without it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
