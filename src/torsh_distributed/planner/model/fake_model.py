"""A model whose tensors have no memory, for the time of a trace: fake CPU tensors take the place of its own.

Not on the meta device: its attention falls back to scores of length × length, which no device keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.planner.torch_internals import FakeTensorMode


@contextmanager
def fake_tensors(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Inside, parameters and buffers of `model` are fake CPU tensors of the same shapes, and operations compute shapes.

    Its own tensors, the mode of its modules and the attributes that its forwards set are put back afterwards. Shared
    parameters stay shared.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in model.modules()
    ]
    made: dict[int, Any] = {}

    def stand_in(tensor: Tensor) -> Any:
        if id(tensor) not in made:
            with torch.no_grad():
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_param = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_param else empty
        return made[id(tensor)]

    # Shapes that do not go together are told by whoever catches the error; torch logs them with a traceback.
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with mode:
            for module, _, params, buffers in before:
                module._parameters.update({name: stand_in(one) for name, one in params.items() if one is not None})
                module._buffers.update({name: stand_in(one) for name, one in buffers.items() if one is not None})
            yield mode
    finally:
        log.disabled = was_disabled
        for module, attributes, params, buffers in before:
            for name in set(vars(module)) - set(attributes):
                del vars(module)[name]
            vars(module).update(attributes)
            module._parameters.clear()
            module._parameters.update(params)
            module._buffers.clear()
            module._buffers.update(buffers)
