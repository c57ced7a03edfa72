"""What devices can compute at most, from their vendors' data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
