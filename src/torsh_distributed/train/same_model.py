"""A model that differs between ranks is found before the first step, and the difference is named."""

from __future__ import annotations

import hashlib
import itertools
import json

from torch import nn

from torsh_distributed.comm import process_group
from torsh_distributed.comm.objects import all_gather_object
from torsh_distributed.errors import TensorShapeMismatch


def require_same_model(model: nn.Module) -> None:
    """Raise TensorShapeMismatch on every rank unless all built the same model; every rank calls this.

    Names, shapes, dtypes and what is frozen must agree, in order; values need not. A hash travels; only where it
    differs do the descriptions.
    """
    mine = _description(model)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = all_gather_object(digest)
    if len(set(digests)) == 1:
        return
    found = all_gather_object(mine)
    other = next(rank for rank, value in enumerate(digests) if value != digests[0])
    first, second = next(
        pair for pair in itertools.zip_longest(found[0], found[other], fillvalue="nothing") if pair[0] != pair[1]
    )
    raise TensorShapeMismatch(
        f"the ranks built different models: rank 0 has {first} where rank {other} has {second}",
        hint="build the model from the same configuration on every rank, before anything depends on the rank",
        rank=process_group.get_rank(),
    )


def _description(model: nn.Module) -> list[str]:
    params = [
        f"{name} {tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' frozen'}"
        for name, param in model.named_parameters()
    ]
    return params + [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
