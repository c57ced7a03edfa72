"""Random numbers in forward: other ones for other parts of a batch or of a model; in a tensor-parallel model equal ones
on all ranks for whole activations, different ones for pieces.

A forward draws from a stream of its part, derived from the process's own, which then goes on: so ranks that were seeded
alike drop other activations of their samples, and nothing but the process's state has to be kept to resume.

Between a layer that splits its output and the one that sums again, each rank draws from a stream of its own, derived
from the common one; then the common stream goes on. So recomputing a block, which restores the common state, draws the
same numbers again. Ranks must enter with equal states: `share_random_state` makes them so once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.parallel.compiling import outside_graphs
from torsh_distributed.parallel.torch_internals import _random


@dataclass
class _LocalStream:
    device: torch.device
    common: Tensor


_current: _LocalStream | None = None


def draws_numbers(model: nn.Module) -> bool:
    """Whether the model drops activations in training, by its modules or by numbers in their configuration."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.AlphaDropout) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


def skips_layers(model: nn.Module) -> bool:
    """Whether the model leaves out layers at random in training, as those of transformers with a `layerdrop` do."""
    return any(
        "layerdrop" in name and isinstance(value, float) and value > 0
        for module in model.modules()
        for name, value in vars(module).items()
    )


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give every rank of the group the first one's random state; every rank calls this."""
    source = dist.get_process_group_ranks(group)[0]
    torch.set_rng_state(broadcast_object(torch.get_rng_state(), source, group=group))
    if device.type == "cuda":
        torch.cuda.set_rng_state(broadcast_object(torch.cuda.get_rng_state(device), source, group=group), device)


@contextmanager
def stream_of(part: int | None, device: torch.device) -> Iterator[None]:
    """Draw numbers that no other part draws; None: those of the process.

    The process's own stream goes on afterwards, as if nothing had happened if nothing was drawn.
    """
    if part is None:
        yield
        return
    common = _state(device)
    _seed(device, zlib.crc32(common.numpy().tobytes(), part + 1))
    first = _state(device)
    try:
        yield
    finally:
        has_drawn = not torch.equal(_state(device), first)
        _restore(device, common)
        if has_drawn:
            torch.rand(1, device=device)  # the next forward must draw others


class _PieceNumbers:
    """What torch asks around a random operation on a DTensor: it knows how on GPUs alone.

    On a CPU it would draw the same for all pieces. Torch takes such an object as it is; a tracker of its own for CPUs
    would let us drop this.
    """

    distribute_region_enabled = True

    @contextmanager
    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        part = None
        for dim, placement in enumerate(spec.placements):
            if placement.is_shard():
                part = (part or 0) * spec.mesh.size(dim) + spec.mesh.get_local_rank(dim)
        device, process = torch.device("cpu"), torch.get_rng_state()
        if generator is not None:
            torch.set_rng_state(generator.get_state())
        with stream_of(part, device):
            yield
        if generator is not None:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(process)


def draw_by_piece() -> None:
    """Let random operations on DTensors draw other numbers for other pieces on a CPU too. Once per process."""
    if _random._rng_tracker is None:
        _random._rng_tracker = _PieceNumbers()  # type: ignore[assignment]  # it has what torch calls


def draw_own_numbers(model: nn.Module) -> None:
    """Let the split layers of a model draw a rank's own numbers; for one whose modules do not show that it draws."""
    for module in model.modules():
        if hasattr(type(module), "draws_numbers"):
            setattr(module, "draws_numbers", True)  # noqa: B010 (mypy takes a module's attributes for tensors)


@outside_graphs
def begin_local_stream(device: torch.device, rank: int) -> None:
    """Draw this rank's own numbers from now on; nothing happens if that is so already."""
    global _current
    if _current is not None:
        return
    common = _state(device)
    _current = _LocalStream(device, common)
    # 32 bits: torch's generator on the CPU ignores the others.
    _seed(device, zlib.crc32(common.numpy().tobytes(), rank + 1))


@outside_graphs
def end_local_stream() -> None:
    """Draw the common numbers again; nothing happens if that is so already."""
    global _current
    if _current is None:
        return
    stream, _current = _current, None
    _restore(stream.device, stream.common)
    torch.rand(1, device=stream.device)  # the next local stream must be another one


def _state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _seed(device: torch.device, seed: int) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.random.default_generator.manual_seed(seed)
