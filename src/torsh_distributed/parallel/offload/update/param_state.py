"""Gives one parameter that offload does not page its master values and moments: stored, or on the device."""

from __future__ import annotations

import torch
from torch import nn

from torsh_distributed.parallel.offload.budget import place_state
from torsh_distributed.parallel.offload.shards.shard_target import ShardTarget, StoredShard
from torsh_distributed.parallel.offload.storage.forms import Form
from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece, TieredStorage, cut, max_numel, write
from torsh_distributed.parallel.offload.update.targets import ParamTarget, flat_of, is_updatable_in_place


def place_param_state(
    name: str,
    param: nn.Parameter,
    storage: TieredStorage,
    form: Form,
    *,
    stays: bool = False,
    shard: StoredShard | None = None,
) -> ParamTarget:
    """The target to update. `stays`: its state is on the device; `shard`: where the parameter itself is stored.

    fp32 parameters on the host are updated in place, stored ones whatever the form of their state; others get master
    values.
    """
    flat = flat_of(param)
    pieces = [StatePiece(low, high) for low, high in cut(0, flat.numel(), max_numel(form))]
    is_fp32 = flat.dtype == torch.float32
    in_place = is_fp32 and (stays or shard is not None or (is_updatable_in_place(flat) and form.is_exact))
    for piece in pieces:
        part = flat[piece.start : piece.stop]
        if in_place:
            piece.master = part
        elif stays:
            piece.master = part.float()
        else:
            piece.master = storage.add(f"master values of {name}", piece.numel, role="param", form=form)
            write(storage, piece.master, part.to("cpu", torch.float32))
    place_state(name, pieces, form, storage, device=flat.device if stays else None)
    if shard is not None:
        return ShardTarget(param, pieces, shard, is_in_place=is_fp32)
    return ParamTarget(name, param, pieces, is_in_place=is_fp32)
