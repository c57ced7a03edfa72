"""Text from a model in training: `generate()` on every rank's part of it, or on the whole model on the first rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.models.same_model import user_class
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.parallel.weights.model_weights import compute_buffers
from torsh_distributed.train.batches import to_device


def generate(
    strategy: Strategy, device: torch.device, seed: int, inputs: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """The model's own `generate(*inputs, **options)`; every rank calls this and gets the same result.

    Tensors are those of rank 0, and all ranks draw the same random numbers, so replicas and shards take the same
    steps. A model that is split over tp, pp or cp is put together on rank 0, which must have room for it.
    """
    model = strategy.whole_model
    if not callable(getattr(model, "generate", None)):
        raise InvalidArgument(
            f"{type(model).__name__} has no generate()",
            hint="call engine.unwrapped under torch.no_grad() in a loop of your own, on every rank",
        )
    inputs, options = _of_first_rank(inputs, device), _of_first_rank(options, device)
    was_training = strategy.unwrapped.training
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        if strategy.has_whole_forward:
            strategy.unwrapped.eval()
            try:
                return strategy.unwrapped.generate(*inputs, **options)  # type: ignore[operator]  # checked above
            finally:
                strategy.unwrapped.train(was_training)
        gathered = _gathered(strategy, device)
        made = None
        with fail_together("generate", torch.distributed.group.WORLD):
            if gathered is not None:
                made = to_device(gathered.generate(*inputs, **options), torch.device("cpu"))  # type: ignore[operator]  # checked above
        return to_device(broadcast_object(made, 0), device)


def _of_first_rank(values: Any, device: torch.device) -> Any:
    """The values, with tensors taken from rank 0; objects of the caller's own stay as they are on each rank."""
    if process_group.world_size() == 1:
        return to_device(values, device)
    items = dict(enumerate(values)) if isinstance(values, tuple) else dict(values)
    mine = {key: value.cpu() for key, value in items.items() if isinstance(value, Tensor)}
    items.update(to_device(broadcast_object(mine, 0), device))
    return tuple(items.values()) if isinstance(values, tuple) else items


def _gathered(strategy: Strategy, device: torch.device) -> nn.Module | None:
    """A copy of the whole model on rank 0; None on the others, which take part in joining its tensors."""
    model = strategy.whole_model
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(config, "save_pretrained", None)):
        raise InvalidArgument(
            f"{type(model).__name__} is split over ranks, and only transformers models can be put together again",
            hint="export it, and load the export in another process",
        )
    is_first = process_group.rank() == 0
    tensors = {}
    for name, value in strategy.whole_tensors():
        if is_first:
            tensors[name] = value.detach().to(device, copy=True)
    if not is_first:
        return None
    with torch.device("meta"):
        made = user_class(model)(copy.deepcopy(config))
    made.load_state_dict(tensors, assign=True)
    compute_buffers(made, device)
    made.generation_config = model.generation_config
    return made.eval()
