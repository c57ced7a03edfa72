"""Forwards that only find out shapes: their results are discarded, and they change no state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_num_probes = 0


def is_probing() -> bool:
    """Whether the current forward is a probe: modules that learn in forward must not do so then."""
    return _num_probes > 0


@contextmanager
def probing(module: nn.Module) -> Iterator[None]:
    """Run forwards of `module` as probes: its buffers, such as the means of a batch norm, and the host's random state
    are restored afterwards.

    A buffer that no forward changed is not written either: a graph whose backward is still to come may have kept it.
    """
    global _num_probes
    before = [(buffer, buffer.clone(), buffer._version) for buffer in module.buffers()]
    _num_probes += 1
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        _num_probes -= 1
        with torch.no_grad():
            for buffer, value, version in before:
                if buffer._version != version:
                    buffer.copy_(value)


@contextmanager
def trying(model: nn.Module) -> Iterator[None]:
    """Around forwards that only look: evaluation mode, no gradients, buffers and random state as before."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with probing(model), torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
