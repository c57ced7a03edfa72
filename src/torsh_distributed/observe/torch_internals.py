"""Private names of torch that `observe` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

MEMBERS = {
    "torch._dynamo.utils.counters": "whether torch.compile is in use, without importing it",
    "torch._ops.OpOverload._overloadpacket": "the operator of an overload",
    "torch.autograd.Variable._execution_engine": "queue_callback: called when this backward has ended",
    "torch.nn.Module._forward_hooks": "hooks that come and go in every step",
    "torch.nn.Module._forward_pre_hooks": "hooks that come and go in every step",
    "torch.ops.aten._grouped_mm": "its operations are counted",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "its operations are counted",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "the hook comes and goes; registering it each time is slow",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "waits for batches are timed in it",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
