"""Private names of torch that `planner` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

MEMBERS = {
    "torch.UntypedStorage._cdata": "which storage a fake tensor has: its address is always 0",
    "torch.nn.Module._buffers": "a module's own buffers, replaced while it is traced",
    "torch.ops.aten._grouped_mm": "experts: its shapes for other formats than bf16",
    "torch.ops.aten._softmax_backward_data": "timed",
    "torch.ops.aten._to_copy": "a copy of a parameter that autocast makes",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator": "replaced while a model is traced",
    "torch.nn.Module._parameters": "a module's own parameters, replaced while it is traced",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
