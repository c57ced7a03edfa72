"""State of FairScale's shards: whole from the parts of all ranks, and a rank's part of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.whole_state import part_of, whole


@torch.no_grad()
def write_part(full: Tensor, shard: Tensor) -> None:
    """Copy this rank's part of a whole tensor into its shard."""
    part = part_of(full, shard)
    assert isinstance(part, DTensor), "sharded as its parameter"
    assert isinstance(shard, DTensor), "a parameter that FSDP2 has sharded"
    shard.to_local().copy_(part.to_local())


def joined(weights: Sequence[Mapping[str, Tensor]], metadata: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The whole state from the shards of all ranks, in order of rank, and the whole shapes."""
    if not weights or len(weights) != len(metadata):
        raise InvalidArgument(
            "the shards and the metadata of every rank are needed",
            num_shards=len(weights),
            num_metadata=len(metadata),
        )
    shapes = metadata[0]
    state = {}
    for name, value in weights[0].items():
        if name not in shapes:
            state[name] = value
            continue
        rows = torch.cat([one[name] for one in weights if one[name].numel()])
        if tuple(rows.shape) != tuple(shapes[name]):
            raise InvalidArgument(
                f"the shards of {name} do not make the whole",
                hint="pass the shards of all ranks of one run, in order of rank",
                found=tuple(rows.shape),
                whole=tuple(shapes[name]),
            )
        state[name] = rows
    return state


def whole_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors on the CPU; every rank calls this."""
    saved = optimizer.state_dict()
    state = {
        index: {key: whole(value).cpu() if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    return {"state": state, "param_groups": saved["param_groups"]}


def optimizer_part(full: Mapping[str, Any], params: Sequence[nn.Parameter]) -> dict[str, Any]:
    """This rank's part of a whole optimizer state over these parameters."""
    order = [index for group in full["param_groups"] for index in group["params"]]
    if len(order) != len(params):
        raise InvalidArgument(
            "the saved optimizer state is of another model", saved=len(order), num_parameters=len(params)
        )
    like = dict(zip(order, params, strict=True))
    state = {
        index: {
            key: part_of(value, like[index]) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        for index, values in full["state"].items()
    }
    return {"state": state, "param_groups": full["param_groups"]}
