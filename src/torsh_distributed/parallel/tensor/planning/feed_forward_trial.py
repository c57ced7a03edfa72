"""Whether a feed-forward module computes the same in two halves: found out by running it on a few numbers.

Names and classes of layers do not show what a forward does between them. `down(gelu(up(x)))` is the sum of its halves;
`u - u.mean(-1)`, a norm or a softmax over the hidden features is not, and raises nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.models.structure import FeedForward

_ROUNDING = 1e-2
"""Of half precision, on sums that differ by tens of percent if halves do not know of each other."""


def splits_between(model: nn.Module, pair: FeedForward) -> bool:
    """Whether the layers that widen may give each rank its own features: no other parameter needs all of them, and the
    module computes the same in halves. True where it cannot be run by itself."""
    parent = model.get_submodule(pair.where)
    start = len(pair.where) + 1 if pair.where else 0
    ups, down = [name[start:] for name in pair.up], pair.down[start:]
    layers = (*ups, down)
    others = [name for name, _ in parent.named_parameters() if name.rpartition(".")[0] not in layers]
    if others:
        return False  # used on pieces, its gradient would be that of a piece
    if any(param.is_meta for param in parent.parameters()):
        return True
    with trying(parent):
        return _is_sum_of_halves(parent, ups, down)


def _is_sum_of_halves(parent: nn.Module, ups: list[str], down: str) -> bool:
    wide, narrow = parent.get_submodule(ups[0]), parent.get_submodule(down)
    assert isinstance(wide, nn.Linear), "pairs are of linear layers"
    assert isinstance(narrow, nn.Linear), "pairs are of linear layers"
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(2, 3, wide.in_features, generator=generator).to(wide.weight)
    matrix = narrow.weight
    if not bool(matrix.any()):  # initialised so that a block does nothing at first
        matrix = torch.randn(matrix.shape, generator=generator).to(matrix) / matrix.shape[1] ** 0.5
    half = wide.out_features // 2
    try:
        whole = functional_call(parent, {f"{down}.weight": matrix}, (given,))
    except Exception:
        # It takes other arguments than one tensor: the comparison on the first batch will see it run.
        return True
    if not isinstance(whole, Tensor):
        return True
    try:
        parts = [
            functional_call(parent, _part(parent, ups, down, matrix, rows), (given,))
            for rows in (slice(None, half), slice(half, None))
        ]
    except Exception:
        # Its own code, on half of what it expects, may raise anything.
        return False
    if any(part.shape != whole.shape for part in parts):
        return False
    bias = 0 if narrow.bias is None else narrow.bias
    return bool((parts[0] + parts[1] - bias - whole).norm() <= _ROUNDING * (whole - bias).norm())


def _part(parent: nn.Module, ups: list[str], down: str, matrix: Tensor, rows: slice) -> dict[str, Tensor]:
    values = {f"{down}.weight": matrix[:, rows]}
    for name in ups:
        for kind, param in parent.get_submodule(name).named_parameters(recurse=False):
            values[f"{name}.{kind}"] = param[rows]
    return values
