"""FairScale's balance_by_time and balance_by_size: how many layers each stage of a Pipe gets."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.parallel.activation import activation_bytes
from torsh_distributed.parallel.pipeline.layer_partition import partition

Value = Tensor | tuple[Tensor, ...]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Value,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int = "cuda",
) -> list[int]:
    """Layers of each stage such that the slowest stage is as fast as possible, by measured time on `device`.

    Measures forward and backward of copies of the layers, again and again for `timeout` seconds.
    """
    if any(param.grad is not None for param in module.parameters()):
        raise ValueError("some parameter already has gradient")
    place = _device(device)
    seconds = [0.0] * len(module)
    end = time.monotonic() + timeout
    while True:
        for index, (layer, value) in enumerate(_walk(module, sample, place)):
            _finish(place)
            started = time.monotonic()
            outputs = [one for one in _parts(layer(value)) if one.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, outputs)
            _finish(place)
            seconds[index] += time.monotonic() - started
        if time.monotonic() >= end:
            return _counts(seconds, partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Value,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int = "cuda",
) -> list[int]:
    """Layers of each stage such that the largest stage is as small as possible, by the memory training takes.

    A layer takes `param_scale` times its parameters, and what it keeps for the backward of a microbatch. Works on any
    device; FairScale's needs CUDA.
    """
    first = input if isinstance(input, Tensor) else input[0]
    scale = first.shape[0] / chunks
    one = input[:1] if isinstance(input, Tensor) else tuple(part[:1] for part in input)
    sizes = []
    for layer, value in _walk(module, one, _device(device)):
        params = sum(param.numel() * param.element_size() for param in layer.parameters())
        kept = activation_bytes(layer, value) if params else _output_bytes(layer, value)
        sizes.append(kept * scale + params * param_scale)
    return _counts(sizes, partitions)


def _counts(costs: list[float], partitions: int) -> list[int]:
    starts = partition(costs, partitions)
    return [last - first for first, last in pairwise([*starts, len(costs)])]


def _walk(module: nn.Sequential, sample: Value, device: torch.device) -> Iterator[tuple[nn.Module, Value]]:
    """Copies of the layers, each with its input, on the device; nothing of the module changes."""
    value: Any = tuple(_leaf(one, device) for one in sample) if isinstance(sample, tuple) else _leaf(sample, device)
    for layer in module:
        twin = copy.deepcopy(layer).to(device).train()
        yield twin, value
        with torch.no_grad():
            out = twin(value)
        value = tuple(_leaf(one, device) for one in out) if isinstance(out, tuple) else _leaf(out, device)


def _leaf(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.is_floating_point())


def _output_bytes(layer: nn.Module, value: Value) -> int:
    with torch.no_grad():
        return sum(one.nbytes for one in _parts(layer(value)))


def _parts(value: Value) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _device(device: torch.device | str | int) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
