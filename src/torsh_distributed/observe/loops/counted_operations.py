"""Counts the arithmetic of a forward while it runs, and what its backward will take: no result changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from typing_extensions import override

from torsh_distributed.observe.torch_internals import FakeTensor, TorchDispatchMode

PEAK_FLOPS: Mapping[str, float] = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
}
"""Dense bf16 operations per second by name of the GPU; the first name that fits."""


def known_peak(device: torch.device) -> float | None:
    """The device's dense bf16 operations per second, if it is in the table."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_FLOPS.items() if known in name), None)


_log = logging.getLogger(__name__)
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm
"""Of experts: torch's table has no formula for it."""


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """While it is entered, adds up `num_forward_flops`, and in `num_flops` also what backward will take.

    Matrix products, convolutions and attention count, at two operations for each multiply-add.
    A product whose two factors need gradients has two more products in backward; with frozen weights it has one.
    Recomputing activations is not counted, as it is not work of the model. torch's FlopCounterMode counts backward
    passes only while it is entered, and it cannot be left entered behind a user's back. Shards count what this rank
    does: an operation on DTensors is left to them, and what they do with local tensors comes here.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.num_flops = 0
        self.num_forward_flops = 0
        self._outer: dict[Any, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", None)
        is_counted = _is_counted(packet)
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            if is_counted:
                self._outer[packet] = _factor(args)
            return NotImplemented
        if torch.is_inference_mode_enabled() and packet is not None and not is_counted:
            with self:  # torch takes no composite operation apart there
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        if is_counted:
            try:
                factor = max(_factor(args), self._outer.pop(packet, 1))
                flops = _flops(packet, args, kwargs or {}, out)
                self.num_forward_flops += flops
                self.num_flops += factor * flops
            except Exception:  # a formula that does not know these arguments
                _log.debug("the operations of %s are not counted", packet, exc_info=True)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int] | None:
    """The operations of one call of `func`: of itself, and with its backward; None for what is not counted.

    What counts is said at `CountedOperations`, which leaves fake tensors out; this takes them.
    """
    packet = getattr(func, "_overloadpacket", None)
    if not _is_counted(packet):
        return None
    flops = _flops(packet, args, kwargs, out)
    return flops, _factor(args) * flops


def _is_counted(packet: Any) -> bool:
    return packet in flop_registry or packet in (_CPU_ATTENTION, _GROUPED_PRODUCT)


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    if packet is _CPU_ATTENTION:  # torch counts attention on GPUs only
        query, key, value = (tensor.shape for tensor in args[:3])
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # untyped in torch
    if packet is _GROUPED_PRODUCT:
        left, right = (tensor.shape for tensor in args[:2])
        # A dim that the groups split is whole in one factor, and each group has its part: groups count if both have it.
        groups = left[0] if len(left) == len(right) == 3 else 1
        return int(2 * groups * left[-2] * left[-1] * right[-1])
    return int(flop_registry[packet](*args, **kwargs, out_val=out))


def _factor(args: Any) -> int:
    """One for forward, and one for each of two factors that needs a gradient; a bias takes no product."""
    factors = [one for one in args if isinstance(one, torch.Tensor) and one.dim() > 1 and one.requires_grad]
    return 1 + min(2, len(factors))
