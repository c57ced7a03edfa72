"""What a rank needs for offloaded shards, on the device and in storage, added up before anything is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torsh_distributed.errors import MemoryAllocationFailed
from torsh_distributed.parallel.offload.budget import GB
from torsh_distributed.parallel.offload.storage.forms import Form
from torsh_distributed.parallel.offload.storage.tiered_storage import cut, max_numel
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget
from torsh_distributed.parallel.sharded.shard_keeper import PieceShape


def pieces_with_device_state(pieces: Sequence[PieceShape], ratio: float) -> set[str]:
    """Pieces whose shards, gradients and optimizer state stay on the device: the first ones, up to `ratio` of all."""
    sizes = {piece.name: sum(param.shard_numel for param in piece.params if param.is_trained) for piece in pieces}
    allowed = ratio * sum(sizes.values())
    chosen = set()
    for name, numel in sizes.items():
        allowed -= numel
        if allowed < 0:
            break
        chosen.add(name)
    return chosen


def kept_bytes(piece: PieceShape) -> int:
    """Device memory of a piece whose shards, gradients and optimizer state stay there."""
    total = 0
    for param in piece.params:
        state = (8 if param.dtype == torch.float32 else 12) + param.dtype.itemsize
        total += param.shard_numel * (param.dtype.itemsize + state * param.is_trained)
    return total


def stored_shard_bytes(pieces: Sequence[PieceShape], form: Form) -> int | None:
    """Bytes that the shards of these pieces take in storage; None if that depends on the values.

    Parameters and gradients keep their dtype; the moments, and master values of 16-bit parameters, have the form.
    """
    sizes: list[int | None] = []
    for param in (param for piece in pieces for param in piece.params):
        sizes.append(param.shard_numel * param.dtype.itemsize * (2 if param.is_trained else 1))
        if param.is_trained:
            num_arrays = 2 if param.dtype == torch.float32 else 3
            bounds = cut(0, param.shard_numel, max_numel(form))
            sizes += [form.num_bytes(high - low) for low, high in bounds] * num_arrays
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def pieces_ahead(
    pieces: Sequence[PieceShape], budget: MemoryBudget, *, fixed_bytes: int, keeps_gathered: bool, wanted: int
) -> int:
    """How many pieces may be gathered ahead within the device budget: `wanted`, or fewer.

    In use together are the model's own parameters, those of the piece at work with their whole gradients, and pieces
    gathered ahead. Raises MemoryAllocationFailed if not even one piece at a time fits.
    """
    root = sum(piece.gathered_bytes for piece in pieces if piece.is_root)
    others = sorted((piece for piece in pieces if not piece.is_root), key=lambda piece: -piece.gathered_bytes)
    grads = max((piece.grad_bytes for piece in pieces), default=0)
    if keeps_gathered:
        working, what = root + sum(piece.gathered_bytes for piece in others) + grads, "all pieces stay gathered"
    else:
        largest = others[0] if others else pieces[0]
        working = root + (largest.gathered_bytes if others else 0) + grads
        what = f"the largest piece is {largest.name or 'the model itself'}"
    if fixed_bytes + working > budget.limit_bytes:
        raise MemoryAllocationFailed(
            f"the device budget of {budget.limit_bytes} bytes is too small: gathered parameters and gradients in use "
            f"need {working} bytes ({what}), and {fixed_bytes} of shards stay on the device",
            hint=f"set offload.gpu_memory_budget_gb to at least {(fixed_bytes + working) / GB:.6f}, "
            + ('use fsdp.strategy = "full_shard"' if keeps_gathered else "make smaller pieces (fsdp.wrap)")
            + ", or lower offload.device_optimizer_ratio",
            needed_bytes=fixed_bytes + working,
            budget_bytes=budget.limit_bytes,
        )
    left = budget.limit_bytes - fixed_bytes - working
    ahead = 0
    for piece in () if keeps_gathered else others[1:]:
        left -= piece.gathered_bytes
        if left < 0:
            break
        ahead += 1
    return wanted if keeps_gathered else min(wanted, ahead)


@dataclass(frozen=True, slots=True)
class PiecePlace:
    """Which of a piece's shards are on disk."""

    are_params_on_disk: bool
    are_grads_on_disk: bool


def place_pieces(pieces: Sequence[PieceShape], host_bytes: int, *, has_disk: bool) -> dict[str, PiecePlace]:
    """Parameters get host memory first, because a step reads them three times; then gradients, while there is room.

    A piece is in one place as a whole: FSDP2 reduces its gradients as one buffer. Without a disk all is in host memory.
    """
    left = host_bytes
    on_disk: dict[str, list[bool]] = {piece.name: [] for piece in pieces}
    for is_grad in (False, True):
        for piece in pieces:
            params = [param for param in piece.params if param.is_trained or not is_grad]
            size = sum(param.shard_numel * param.dtype.itemsize for param in params)
            is_out = has_disk and size > left
            left -= 0 if is_out else size
            on_disk[piece.name].append(is_out)
    return {name: PiecePlace(*found) for name, found in on_disk.items()}
