"""Private names of torch that `migrate` uses: members of its objects, below.

Functions come from `parallel`. `tests/test_torch_internals.py` has a case for each, so a torch that changed one fails
there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

MEMBERS = {
    "torch.Tensor._backward_hooks": "a script's hooks, run on the gradient of the gathered parameter",
    "torch.Tensor._post_accumulate_grad_hooks": "the same of hooks that get the parameter: refused on shards",
    "torch.Tensor._values": "the values of a sparse gradient",
    "torch.amp.GradScaler._unscale_grads_": "extended, as FairScale does",
    "torch.autograd.Variable._execution_engine": "queue_callback: called when this backward has ended",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "its state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._module_to_pre_save_state_dict_hook_handle": "a hook that gathers",  # noqa: E501
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group|_fsdp_param_groups": "the second since torch 2.13",  # noqa: E501
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init": "before the first forward",
    "torch.distributed.tensor.DTensor._local_tensor": "the shard itself, without a node in the graph",
    "torch.nn.Module._apply": "what moves and casts a module; shards stay where they are",
    "torch.nn.Module._buffers": "a module's own buffers, replaced in place",
    "torch.nn.Module._parameters": "a module's own parameters, replaced in place",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
