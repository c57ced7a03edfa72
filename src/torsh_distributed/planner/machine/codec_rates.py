"""What compressing gradients costs: measured by method, and chosen for a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.auto import CANDIDATES, NEARLY_EXACT, NONE
from torsh_distributed.compress.codecs.base import Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.sparse.base import SparseCodec
from torsh_distributed.plan import CompressConfig
from torsh_distributed.plan.sections.compress import METHODS
from torsh_distributed.planner.machine.link_measuring import slowest_s
from torsh_distributed.planner.machine.machine_profile import DeviceLink
from torsh_distributed.planner.machine.measured_rates import CodecRate, SizeTable
from torsh_distributed.planner.machine.measuring import OperationTimer

MEASURED = (*(name for name in METHODS if name not in (NONE, "auto")), "topk:0.01")
"""With the numbers that they have by default, and as `auto` tries them."""
_SIZES = {"cpu": (2**16, 2**20, 2**23), "cuda": (2**18, 2**22, 2**26)}
_WIDTH = 256
_LARGE_BYTES = 2.0**23
"""Of the bucket for which `auto` is taken to choose."""


def travel_s(rate: CodecRate, num_bytes: float, num_ranks: int, link: DeviceLink) -> float:
    """What the messages of an average take: as measured with so many ranks, else from their bytes."""
    if rate.average is not None and num_ranks in link.tables:
        return max(0.0, rate.average.seconds_at(num_bytes) - rate.busy_s(num_bytes, num_ranks))
    message = rate.share * num_bytes
    if rate.travels == "gathered":
        return link.ring_s(message * num_ranks, num_ranks, laps=1)
    return link.ring_s(message, num_ranks, laps=2)


def codec_rate(
    config: CompressConfig, rates: Mapping[str, CodecRate], num_ranks: int, link: DeviceLink
) -> CodecRate | None:
    """The rate of a plan's method over some ranks; None for none, and for one that was not measured.

    A number other than those measured takes the rate of its method. Of `auto` it is the candidate that averages a large
    bucket the soonest.
    """
    if config.method != "auto":
        return None if config.name == NONE else _rate_of(config.method, rates)
    named = CANDIDATES if config.error_feedback != "none" else NEARLY_EXACT
    known = [_rate_of(name, rates) for name in named if name != NONE]
    size = _LARGE_BYTES
    best, least_s = None, link.ring_s(size, num_ranks, laps=2)
    for one in known:
        if one is not None and (taken := one.busy_s(size, num_ranks) + travel_s(one, size, num_ranks, link)) < least_s:
            best, least_s = one, taken
    return best


def _rate_of(method: str, rates: Mapping[str, CodecRate]) -> CodecRate | None:
    return rates.get(method) or rates.get(method.partition(":")[0])


def measure_codecs(timer: OperationTimer, methods: Sequence[str] = MEASURED) -> dict[str, CodecRate]:
    """Rates of some methods, on gradients of a matrix; every rank that shares the machine calls this."""
    return {name: _measured(name, timer) for name in methods}


def _measured(method: str, timer: OperationTimer) -> CodecRate:
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    codec, key = make_codec(method), Key(rank=0 if group is None else group.rank())
    sizes = _SIZES[timer.device.type]
    encode, decode, average = [], [], []
    share, is_added_up = 0.0, False
    for size in sizes:
        x = torch.randn(size // 4, device=timer.device)
        codec.set_shapes(key.stream, [(x.numel() // _WIDTH, _WIDTH)])
        payload = codec.encode(x, key)
        encode.append(timer.seconds(partial(codec.encode, x, key)))
        decode.append(timer.seconds(partial(codec.decode, payload, x.numel(), key)))
        if group is not None:
            average.append(slowest_s(partial(codec.average, x, group, key)))
        share, is_added_up = payload.nbytes / x.nbytes, payload.dtype is not torch.uint8
        codec.reset()
    points = tuple(map(float, sizes))
    is_exchanged = isinstance(codec, DenseCodec) and not is_added_up
    travels = "gathered" if isinstance(codec, SparseCodec) else "exchanged" if is_exchanged else "summed"
    return CodecRate(
        travels=travels,
        share=share,
        encode=SizeTable(points, tuple(encode)),
        decode=SizeTable(points, tuple(decode)),
        average=SizeTable(points, tuple(average)) if average else None,
    )
