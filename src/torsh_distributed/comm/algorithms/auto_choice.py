"""`algorithm="auto"`: estimate by measured costs, try the best few, keep the fastest.

The model knows nothing of ranks that share cores or of a backend's optimisations, so it only narrows the field: what it
puts within four times the best is tried for each size (in powers of two), together with the backend's own, in a race
from which slow candidates drop out. For small buffers, where the model knows latency only, every algorithm is tried;
the smallest, where only latency counts, share one trial.
All ranks agree on every number that decides, so they all make the same choice.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed import events
from torsh_distributed.comm.algorithms.base import Algorithm, Channel, MeasuredCosts, MessageCost
from torsh_distributed.comm.algorithms.execution import check_on_cpu, new_channel, start_all_reduce
from torsh_distributed.comm.algorithms.hierarchical import by_node, node_of_ranks
from torsh_distributed.comm.algorithms.registry import ALGORITHMS, AUTO, DETERMINISTIC, check_order, find_algorithm
from torsh_distributed.comm.recording.flight_recorder import in_thread
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import BackendNotInitialized

_PROBE_BYTES = 256
_LARGE_BYTES = 4 * 2**20
_NUM_MESSAGES = 8
_NO_COST = MessageCost(0.0, 0.0, 0.0)


def measure_costs(group: dist.ProcessGroup) -> MeasuredCosts:
    """Time small and large messages between neighbours, all at once; every rank of the group calls this.

    All ranks get the same costs: each is the largest that any rank saw, because an all-reduce is as slow as its
    slowest link. Takes about forty exchanges.
    """
    channel = new_channel(group)
    nodes = _known_nodes(group)
    flat, fold_byte_s = _measure(channel), _measure_fold()
    near = far = _NO_COST
    if len(nodes) > 1:
        mine = next(members for members in nodes if channel.position in members)
        near = _measure(channel.select(mine))
        here = mine.index(channel.position)
        far = _measure(channel.select([members[here] for members in nodes if here < len(members)]))
    seen = torch.tensor([*astuple(flat), *astuple(near), *astuple(far), fold_byte_s], dtype=torch.float64)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    agreed = seen.tolist()
    is_layered = len(nodes) > 1
    return MeasuredCosts(
        num_ranks=group.size(),
        flat=MessageCost(*agreed[0:3]),
        fold_byte_s=agreed[9],
        node_sizes=tuple(map(len, nodes)),
        near=MessageCost(*agreed[3:6]) if is_layered else None,
        far=MessageCost(*agreed[6:9]) if is_layered else None,
    )


def _known_nodes(group: dist.ProcessGroup) -> list[list[int]]:
    """Positions by node; empty if the group was not brought up by `init()`, so nodes are unknown."""
    try:
        return by_node(node_of_ranks(group))
    except BackendNotInitialized:
        return []


def _measure(channel: Channel) -> MessageCost:
    """What this rank sees of the ring of a channel; zeros in a channel of one rank, where nothing travels."""
    if channel.size == 1:
        return _NO_COST
    small_s = _least_s(10, lambda: _exchange(channel, _PROBE_BYTES, 1))
    many_s = _least_s(5, lambda: _exchange(channel, _PROBE_BYTES, _NUM_MESSAGES))
    large_s = _least_s(3, lambda: _exchange(channel, _LARGE_BYTES, 1))
    return MessageCost(
        latency_s=small_s,
        message_s=max(0.0, many_s - small_s) / (_NUM_MESSAGES - 1),
        byte_s=max(0.0, large_s - small_s) / _LARGE_BYTES,
    )


def _exchange(channel: Channel, num_bytes: int, num_messages: int) -> None:
    """Send messages to the next rank of the ring while as many arrive from the previous."""
    after, before = (channel.position + 1) % channel.size, (channel.position - 1) % channel.size
    outgoing = torch.zeros(num_bytes, dtype=torch.uint8)
    incoming = [torch.empty_like(outgoing) for _ in range(num_messages)]
    received = [channel.receive(buffer, before) for buffer in incoming]
    sent = [channel.send(outgoing, after) for _ in range(num_messages)]
    channel.wait(*received, *sent)


def _measure_fold() -> float:
    total, incoming = torch.zeros(_LARGE_BYTES // 4), torch.ones(_LARGE_BYTES // 4)
    return _least_s(3, lambda: total.add_(incoming)) / _LARGE_BYTES


def _least_s(num_times: int, body: Callable[[], object]) -> float:
    body()  # the first call pays for connections and pages
    taken = []
    for _ in range(num_times):
        started_s = time.perf_counter()
        body()
        taken.append(time.perf_counter() - started_s)
    return min(taken)  # the rest is what else the machine was doing


_BACKEND = "backend"
_MAX_TRIED = 4
_WORTH_TRYING = 4.0
_TRUSTED_FROM_BYTES = 2 * 2**20
"""From here on bytes, which the model knows best, outweigh latencies; below, every algorithm is tried."""
_SMALL_BYTES = 512 * 1024
_LATENCY_BYTES = 16 * 1024
"""Up to here size does not matter: one choice for all these sizes, tried at this one."""
_LARGEST_TRIED_BYTES = 64 * 2**20
_TRIAL_S = 0.08
"""About how long each candidate is tried in the first round with large buffers."""
_SMALL_BLOCKS = 8
"""Blocks of the first round with small buffers."""
_STILL_IN = (2.5, 1.5, 1.25, 1.05)
"""A candidate stays for the next round, of twice as many blocks, if it took at most this times the best."""
_MAX_ROUND_S = 1.0
"""After a round in which the best took this long there is no other round."""
_BLOCK, _SMALL_BLOCK = 5, 15
"""Calls in a row, with large and with small buffers. Ranks that share cores fall into a rhythm that lasts for a block,
so only many blocks show what to expect."""
_SERIES = 4
"""Blocks of one candidate before the next candidate's turn."""
_USUAL = 0.9
"""The share of blocks that count; the slowest are dropped."""
_TIE = 1.03
"""The backend's own is chosen unless another is faster by more than this."""


class AlgorithmChooser:
    """The choices for one group, made once for each size."""

    def __init__(self) -> None:
        self.costs: MeasuredCosts | None = None
        self._chosen: dict[tuple[int, bool], Algorithm | None] = {}

    def choose(self, num_bytes: int, group: dist.ProcessGroup, *, deterministic: bool) -> Algorithm | None:
        """The algorithm for a buffer of this size, None for the backend's own; every rank of the group calls this."""
        tried_bytes = min(max(num_bytes, _LATENCY_BYTES), _LARGEST_TRIED_BYTES) if num_bytes else 0
        key = (tried_bytes.bit_length(), deterministic)
        if key not in self._chosen:
            was_inside, in_thread.is_inside = (
                in_thread.is_inside,
                True,
            )  # thousands of trials would fill the flight recorder
            try:
                self._chosen[key] = self._decide(tried_bytes, group, deterministic=deterministic)
            finally:
                in_thread.is_inside = was_inside
        return self._chosen[key]

    def _decide(self, num_bytes: int, group: dist.ProcessGroup, *, deterministic: bool) -> Algorithm | None:
        if num_bytes == 0 or group.size() == 1:
            return DETERMINISTIC if deterministic else None
        if self.costs is None:
            self.costs = measure_costs(group)
        estimates = shortlist(num_bytes, self.costs, deterministic=deterministic)
        candidates: dict[str, Algorithm | None] = {name: ALGORITHMS[name] for name in estimates}
        if not deterministic:
            candidates[_BACKEND] = None
        taken_s, fastest = _race(candidates, num_bytes, group, num_blocks=_first_blocks(num_bytes, estimates))
        tried = ", ".join(f"{name} {taken_s[name] * 1e3:.3f} ms" for name in candidates)
        events.emit(
            events.DecisionEvent(
                subject="all_reduce algorithm", choice=fastest, reason=f"{num_bytes} bytes, tried: {tried}"
            )
        )
        return candidates[fastest]


def shortlist(num_bytes: int, costs: MeasuredCosts, *, deterministic: bool = False) -> dict[str, float]:
    """Estimated seconds of the candidates, best first: at most four, within four times the best; all if small."""
    known = {
        name: estimated_s
        for name, algorithm in ALGORITHMS.items()
        if (algorithm.keeps_rank_order or not deterministic)
        and (estimated_s := algorithm.estimated_s(num_bytes, costs)) is not None
    }
    ordered = sorted(known.items(), key=lambda item: item[1])
    if num_bytes < _TRUSTED_FROM_BYTES:
        return dict(ordered)
    limit_s = _WORTH_TRYING * ordered[0][1]
    return {name: estimated_s for name, estimated_s in ordered[:_MAX_TRIED] if estimated_s <= limit_s}


def _block(num_bytes: int) -> int:
    return _SMALL_BLOCK if num_bytes <= _SMALL_BYTES else _BLOCK


def _first_blocks(num_bytes: int, estimates: Mapping[str, float]) -> int:
    if num_bytes <= _SMALL_BYTES:
        return _SMALL_BLOCKS
    return max(2, min(10, round(_TRIAL_S / _BLOCK / max(min(estimates.values()), 1e-6))))


def _race(
    candidates: Mapping[str, Algorithm | None], num_bytes: int, group: dist.ProcessGroup, *, num_blocks: int
) -> tuple[dict[str, float], str]:
    """Seconds of each candidate, over all its trials, and the fastest: slow ones drop out, the rest is tried longer.

    Why: how long a small call takes depends on where the kernel puts the threads. A few trials show which candidates
    are slow, but not which is best.
    """
    field, known = dict(candidates), dict[str, float]()
    for turn, still_in in enumerate(_STILL_IN):
        taken_s = _try_all(field, num_bytes, group, num_blocks=num_blocks << turn)
        before = (1 << turn) - 1  # blocks so far, of those of the first round
        known |= {
            name: (known.get(name, 0.0) * before + taken * (before + 1)) / (2 * before + 1)
            for name, taken in taken_s.items()
        }
        best_s = min(known[name] for name in field)
        field = {name: field[name] for name in field if known[name] <= still_in * best_s}
        if len(field) == 1 or best_s * _block(num_bytes) * (num_blocks << turn) > _MAX_ROUND_S:
            break
    return known, _pick({name: known[name] for name in field})


def _try_all(
    candidates: Mapping[str, Algorithm | None], num_bytes: int, group: dist.ProcessGroup, *, num_blocks: int
) -> dict[str, float]:
    """Seconds of each candidate on the slowest rank: means over blocks, in series of a few.

    Not block by block: a candidate would inherit the rhythm of the one before, which does not happen in use. Nor all
    blocks in a row: a rhythm that the ranks fell into by chance may last that long.
    """
    buffer, block = torch.zeros(max(1, num_bytes // 4)), _block(num_bytes)
    bodies = [_body(algorithm, buffer, group) for algorithm in candidates.values()]
    taken: list[list[float]] = [[] for _ in bodies]
    for first in range(0, num_blocks, _SERIES):
        for body, times in zip(bodies, taken, strict=True):
            body()
            for _ in range(min(_SERIES, num_blocks - first)):
                dist.barrier(group)
                started_s = time.perf_counter()
                for _ in range(block):
                    body()
                times.append((time.perf_counter() - started_s) / block)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    num_usual = max(1, round(num_blocks * _USUAL))  # without outliers that hit a single candidate
    usual = slowest.sort(dim=1).values[:, :num_usual]
    return dict(zip(candidates, usual.mean(dim=1).tolist(), strict=True))


def _pick(taken_s: Mapping[str, float]) -> str:
    fastest = min(taken_s, key=lambda name: taken_s[name])
    is_tie = _BACKEND in taken_s and taken_s[_BACKEND] <= _TIE * taken_s[fastest]
    return _BACKEND if is_tie else fastest


def _body(algorithm: Algorithm | None, buffer: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    if algorithm is None:
        return lambda: dist.all_reduce(buffer, group=group)
    return lambda: start_all_reduce(buffer, ReduceOp.SUM, algorithm, group, is_async=False, timeout_s=None)


_choosers: dict[int, tuple[weakref.ref[dist.ProcessGroup], AlgorithmChooser]] = {}
"""By the id of living groups: looking it up is faster than making a weak reference."""
_left_to_backend: set[tuple[int, int]] = set()
"""(group id, bit length of the size) for which the choice is the backend's own: the quick check of every call."""


def _new_chooser(group: dist.ProcessGroup) -> AlgorithmChooser:
    key = id(group)

    def forget(_: object) -> None:
        _choosers.pop(key, None)
        _left_to_backend.difference_update([known for known in list(_left_to_backend) if known[0] == key])

    chooser = AlgorithmChooser()
    _choosers[key] = (weakref.ref(group, forget), chooser)
    return chooser


def leaves_to_backend(wanted: str | Algorithm, num_bytes: int, group: dist.ProcessGroup) -> bool:
    """Whether `auto` is wanted and has already found the backend's own to be the fastest."""
    return (id(group), num_bytes.bit_length()) in _left_to_backend and wanted == AUTO


def choose_algorithm(
    wanted: str | Algorithm | None, tensor: Tensor, group: dist.ProcessGroup, *, deterministic: bool
) -> Algorithm | None:
    """The algorithm to run, or None for the backend's own all-reduce.

    The first use of "auto" for a size measures, so every rank of the group calls this at the same point of its program.
    """
    if wanted == AUTO:
        return _choose_by_measurement(tensor, group, deterministic=deterministic)
    if wanted is None:
        return DETERMINISTIC if deterministic else None
    chosen = wanted if isinstance(wanted, Algorithm) else find_algorithm(wanted)
    if deterministic:
        check_order(chosen)
    return chosen


def _choose_by_measurement(tensor: Tensor, group: dist.ProcessGroup, *, deterministic: bool) -> Algorithm | None:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        if not deterministic:
            return None
        check_on_cpu(tensor)
    found = _choosers.get(id(group))
    chooser = _new_chooser(group) if found is None else found[1]
    chosen = chooser.choose(tensor.nbytes, group, deterministic=deterministic)
    if chosen is None:
        _left_to_backend.add((id(group), tensor.nbytes.bit_length()))
    return chosen
