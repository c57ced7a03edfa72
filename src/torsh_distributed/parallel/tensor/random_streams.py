"""Random numbers in a tensor-parallel model: equal on all ranks for whole activations, different ones for pieces.

Between a layer that splits its output and the one that sums again, each rank draws from a stream of its own, derived
from the common one; then the common stream goes on. So recomputing a block, which restores the common state, draws the
same numbers again. Ranks must enter with equal states: `share_random_state` makes them so once.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.parallel.compiling import outside_graphs


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


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give every rank of the group the first one's random state; every rank calls this."""
    source = dist.get_process_group_ranks(group)[0]
    torch.set_rng_state(broadcast_object(torch.get_rng_state(), source, group=group))
    if device.type == "cuda":
        torch.cuda.set_rng_state(broadcast_object(torch.cuda.get_rng_state(device), source, group=group), device)


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
