"""The largest elements of a gradient, exactly, without sorting it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torsh_distributed.compress.messages.indices import compiled_for, nonzero
from torsh_distributed.errors import InvalidArgument

_FLOAT_MAX = torch.finfo(torch.float32).max
_SAMPLE = 1 << 15
_SCAN = 1 << 17  # elements whose magnitudes stay in the cache while they are compared


def share_of(share: float, num_elements: int) -> int:
    """How many elements a share is: rounded, and at least one unless there are none."""
    return min(max(1, round(share * num_elements)), num_elements)


def require_share(share: float) -> float:
    """Return the share; raises InvalidArgument unless it is above 0 and at most 1."""
    if not 0 < share <= 1:
        raise InvalidArgument("a share of the elements must be above 0 and at most 1", share=share)
    return share


def at_least(x: Tensor, threshold: float) -> Tensor:
    """Indices, increasing, of the elements of `x` whose magnitude reaches `threshold`."""
    if threshold > _FLOAT_MAX:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    if x.device.type != "cpu":
        return nonzero(x.abs() >= threshold)
    module = compiled_for(x)
    if module is not None:
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        room = torch.empty(x.numel(), dtype=torch.int64)  # pages that are not written take no memory
        return room[: module.at_least(x.data_ptr(), x.numel(), threshold, room.data_ptr())].clone()
    values = x.numpy()
    limit = np.float32(threshold)
    magnitudes = np.empty(min(_SCAN, values.size), np.float32)
    found = [np.empty(0, np.int64)]
    for start in range(0, values.size, _SCAN):
        piece = values[start : start + _SCAN]
        here = np.flatnonzero(np.abs(piece, out=magnitudes[: piece.size]) >= limit)
        here += start
        found.append(here)
    return torch.from_numpy(np.concatenate(found))


def largest(x: Tensor, count: int) -> Tensor:
    """Indices, increasing, of the `count` elements of largest magnitude; of equal ones the first.

    A sample gives a magnitude that somewhat more than `count` elements reach; only those are compared. The result does
    not depend on the sample: a guess that is too low costs time, one that is too high is noticed and lowered.
    """
    numel = x.numel()
    if count == 0 or count >= numel:
        return torch.arange(min(count, numel), device=x.device)
    candidates = _candidates(x, count)
    module = compiled_for(x)
    if module is not None:
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        indices = torch.arange(numel) if candidates is None else candidates
        room = torch.empty(indices.numel(), dtype=torch.int32)
        module.keep_largest(x.data_ptr(), indices.data_ptr(), indices.numel(), count, room.data_ptr())
        return indices[:count].clone()
    magnitudes = x.abs() if candidates is None else x[candidates].abs()
    kth = _kth_largest(magnitudes, count)
    above = magnitudes > kth
    level = nonzero(magnitudes == kth)
    above[level[: count - int(above.sum())]] = True
    chosen = nonzero(above)
    return chosen if candidates is None else candidates[chosen]


def _candidates(x: Tensor, count: int) -> Tensor | None:
    """Indices among which the largest are, or None where that would not save work."""
    numel = x.numel()
    if numel <= 2 * _SAMPLE or count > numel // 4:
        return None
    # An odd stride, so it does not hit the same columns of every row.
    sample = x[:: numel // _SAMPLE | 1].abs()
    expected = count / numel * sample.numel()
    for spread in (3.0, 12.0):
        rank = math.ceil(expected + spread * math.sqrt(expected) + spread / 3)
        if rank >= sample.numel():
            break
        found = at_least(x, float(_kth_largest(sample, rank)))
        if found.numel() >= count:
            return found
    return None


def _kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    if magnitudes.device.type == "cpu":
        place = magnitudes.numel() - k
        return torch.tensor(np.partition(magnitudes.numpy(), place)[place])
    return magnitudes.kthvalue(magnitudes.numel() - k + 1).values
