"""Private names of torch that `train` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

MEMBERS = {
    "torch._dynamo": "whether it is in use, without importing it",
    "torch.Tensor._backward_hooks": "a user's hooks, run later on the whole gradient",
    "torch.Tensor._make_wrapper_subclass": "logits that are not computed yet",
    "torch.Tensor._post_accumulate_grad_hooks": "the same of hooks that get the parameter",
    "torch.UntypedStorage._cdata": "the identity of a storage",
    "torch.amp.GradScaler._unscale_grads_": "extended: shards on the CPU",
    "torch.nn.Module._buffers": "buffers of a copy, put back after a comparison",
    "torch.nn.Module._parameters": "parameters of a copy, put back after a comparison",
    "torch.optim.Optimizer._optimizer_step_post_hooks": "whether a user has put hooks on it",
    "torch.optim.Optimizer._optimizer_step_pre_hooks": "the same before its steps",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "its operations are counted",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
