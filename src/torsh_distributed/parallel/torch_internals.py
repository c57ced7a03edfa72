"""Private names of torch that `parallel` uses: those of modules in the stub, members of torch's objects below.

Names of the stub are imported on first use. `tests/test_torch_internals.py` has a case for each, with its signature, so
a torch that changed one fails there; no other module of this layer may name a private part of torch.
"""

from __future__ import annotations

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)

MEMBERS = {
    "torch.Tensor._base": "the tensor that a view belongs to",
    "torch.Tensor._values": "the values of a sparse gradient",
    "torch.Tensor._version": "whether a tensor was written to in place",
    "torch.autograd.Variable._execution_engine": "queue_callback: called when this backward has ended",
    "torch.distributed.Reducer._get_local_used_map": "parameters that no rank used",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "the parameter group of a piece",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._sharded_param_data": "the padded shard, as gathered",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._all_gather_result": "a gather in flight",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group": "the parameters of a piece",
    "torch.distributed.pipelining.PipelineStage._forward_metadata_inference|_shape_inference": "the second in 2.11",
    "torch.distributed.tensor.DTensor._local_tensor": "the shard itself, without a node in the graph",
    "torch.distributed.tensor._random._rng_tracker": "set: on a CPU torch draws the same for all pieces",
    "torch.nn.Module._apply": "moves a module; extended where parameters are shared",
    "torch.nn.Module._buffers": "a module's own buffers, replaced in place",
    "torch.nn.Module._forward_hooks": "code that a forward runs, which may keep something",
    "torch.nn.Module._forward_pre_hooks": "whether a module has hooks of its own",
    "torch.nn.Module._modules": "a module's own children, replaced in place",
    "torch.nn.Module._non_persistent_buffers_set": "buffers that are not saved",
    "torch.nn.Module._parameters": "a module's own parameters, replaced in place; setattr would register them again",
    "torch.nn.modules.batchnorm._BatchNorm._check_input_dim": "the check of each batch norm",
    "torch.nn.parallel.DistributedDataParallel._ddp_init_helper": "extended: buckets in our order",
    "torch.nn.parallel.DistributedDataParallel._match_all_reduce_for_bwd_pass": "extended for uneven inputs",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model": "experts are apart",
    "torch.nn.parallel.DistributedDataParallel._sync_buffers": "extended: not in every forward",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": "kept by selective recomputation",
    "torch.ops.aten._scaled_dot_product_efficient_attention": "kept by selective recomputation",
    "torch.ops.aten._scaled_dot_product_flash_attention": "kept by selective recomputation",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "kept, and split by heads",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": "split by heads",
    "torch.ops.aten._scaled_mm": "kept by selective recomputation",
    "torch.optim.Adam._init_group": "Adam's state, made as it makes it",
}
"""By path, with the reason: they cannot be imported, or must not be here."""
