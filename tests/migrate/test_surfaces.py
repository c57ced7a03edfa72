"""The calls that scripts of other libraries rely on are there, take their arguments, and are listed in the guides."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.bed.world import ROOT
from torsh_distributed.migrate.deepspeed import deepspeed_modules
from torsh_distributed.migrate.deepspeed.pipe.pipeline_engine import PipelineEngine
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine
from torsh_distributed.migrate.fairscale import fairscale_modules
from torsh_distributed.migrate.horovod import horovod_modules
from torsh_distributed.migrate.horovod.elastic import ElasticSampler, State, TorchState
from torsh_distributed.migrate.horovod.training.reducing_optimizer import ReducingOptimizer

REDUCED = "name, op, prescale_factor, postscale_factor, process_set"
HOROVOD = {
    "horovod": """__version__ run(func, args, kwargs, num_proc, min_num_proc, max_num_proc, slots, reset_limit,
        cooldown_range, hosts, hostfile, host_discovery_script, start_timeout, ssh_port, ssh_identity_file,
        disable_cache, output_filename, verbose, use_gloo, use_mpi, mpi_args, network_interfaces, executable, np,
        min_np, max_np)""",
    "horovod.runner": "run",
    "horovod.torch": f"""init(comm, process_sets) shutdown is_initialized size local_size cross_size rank local_rank
        cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
        cuda_built rocm_built start_timeline(file_path, mark_cycles) stop_timeline
        ProcessSet(ranks_or_comm) global_process_set add_process_set(process_set) remove_process_set(process_set)
        Average Sum Adasum Min Max Product
        allreduce(tensor, average, compression, {REDUCED}) allreduce_async(tensor, average, {REDUCED})
        allreduce_(tensor, average, {REDUCED}) allreduce_async_(tensor, average, {REDUCED})
        grouped_allreduce(tensors, average, compression, {REDUCED}) grouped_allreduce_async(tensors, average, {REDUCED})
        grouped_allreduce_(tensors, average, {REDUCED}) grouped_allreduce_async_(tensors, average, {REDUCED})
        sparse_allreduce_async(tensor, name, op, process_set)
        allgather(tensor, name, process_set) allgather_async(tensor, name, process_set)
        grouped_allgather(tensors, name, process_set) grouped_allgather_async(tensors, name, process_set)
        broadcast(tensor, root_rank, name, process_set) broadcast_async(tensor, root_rank, name, process_set)
        broadcast_(tensor, root_rank, name, process_set) broadcast_async_(tensor, root_rank, name, process_set)
        alltoall(tensor, splits, name, process_set) alltoall_async(tensor, splits, name, process_set)
        reducescatter(tensor, compression, {REDUCED}) reducescatter_async(tensor, {REDUCED})
        grouped_reducescatter(tensors, compression, {REDUCED}) grouped_reducescatter_async(tensors, {REDUCED})
        join(device) barrier(process_set) poll(handle) synchronize(handle)
        broadcast_parameters(params, root_rank) broadcast_optimizer_state(optimizer, root_rank, model)
        broadcast_object(obj, root_rank, name, process_set) allgather_object(obj, name, process_set)
        Compression DistributedOptimizer(optimizer, named_parameters, compression, backward_passes_per_step, op,
        gradient_predivide_factor, num_groups, groups, sparse_as_dense, process_set)
        SyncBatchNorm(num_features, eps, momentum, affine, track_running_stats) elastic HorovodInternalError""",
    "horovod.torch.mpi_ops": "is_homogeneous Sum Average _basics allreduce broadcast",
    "horovod.torch.elastic": """run(func) TorchState(model, optimizer) ElasticSampler(dataset, shuffle, seed)""",
    "horovod.torch.elastic.state": """StateHandler ModelStateHandler OptimizerStateHandler SamplerStateHandler
        get_handler_registry set_handler_registry""",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.functions": "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object",
    "horovod.torch.compression": "Compression",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt(skip_sync)",
    "horovod.common.elastic": "State ObjectState run_fn",
    "horovod.common.process_sets": "ProcessSet global_process_set",
    "horovod.common.util": "extension_available",
    "horovod.common.basics": "HorovodBasics",
}
HOROVOD_METHODS: dict[type, str] = {
    ReducingOptimizer: """synchronize skip_synchronize set_backward_passes_per_step step(closure) zero_grad(set_to_none)
        load_state_dict _parameter_names""",
    State: "save restore sync commit check_host_updates register_reset_callbacks on_reset on_hosts_updated",
    TorchState: "save restore sync commit",
    ElasticSampler: """set_epoch record_batch(batch_idx, batch_size) state_dict load_state_dict reset __len__""",
}
DEEPSPEED = {
    "deepspeed": """initialize(args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port,
        mpu, dist_init_required, collate_fn, config, mesh_param, config_params)
        init_distributed(dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method,
        dist_init_required, config, rank, world_size) add_config_arguments(parser) get_accelerator DeepSpeedEngine
        PipelineEngine""",
    "deepspeed.comm": """all_reduce all_gather broadcast barrier get_rank get_world_size new_group is_initialized
        all_gather_into_tensor reduce_scatter_tensor all_to_all_single inference_all_reduce all_gather_coalesced
        monitored_barrier log_summary(show_straggler, return_dict) configure get_local_rank initialize_mesh_device
        ReduceOp init_distributed""",
    "deepspeed.zero": """Init(module, data_parallel_group, mem_efficient_linear, remote_device, pin_memory,
        config_dict_or_path, config, enabled, dtype, mpu) GatheredParameters(params, modifier_rank, fwd_module, enabled)
        register_external_parameter TiledLinear unwrap_model_for_generation""",
    "deepspeed.pipe": """PipelineModule(layers, num_stages, topology, loss_fn, partition_method,
        activation_checkpoint_interval) LayerSpec TiedLayerSpec""",
    "deepspeed.utils": """logger log_dist RepeatingLoader OnDevice groups set_z3_leaf_modules zero_to_fp32
        safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param
        safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
        safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state""",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)",
    "deepspeed.checkpointing": "configure checkpoint",
    "deepspeed.ops.adam": "FusedAdam DeepSpeedCPUAdam",
    "deepspeed.moe.layer": "MoE",
    "deepspeed.elasticity": "compute_elastic_config",
    "deepspeed.runtime.zero.stage3": "estimate_zero3_model_states_mem_needs_all_live",
    "deepspeed.runtime.config": "DeepSpeedConfig",
    "deepspeed.runtime.config_utils": "DeepSpeedConfigModel",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig",
    "deepspeed.runtime.precision_config": "DeepSpeedFP16Config",
    "deepspeed.runtime.lr_schedules": "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR",
    "deepspeed.runtime.pipe.topology": "ProcessTopology PipelineParallelGrid",
    "deepspeed.runtime.utils": "partition_uniform partition_balanced",
}
DEEPSPEED_METHODS: dict[type, str] = {
    DeepSpeedEngine: """forward backward(loss, retain_graph, scale_wrt_gas) step(lr_kwargs) scale(loss)
        is_gradient_accumulation_boundary set_gradient_accumulation_boundary no_sync coalesce_grad_reduction
        was_step_applied get_lr get_mom get_type get_global_grad_norm get_batch_info set_train_batch_size
        set_train_micro_batch_size train eval zero_grad destroy empty_partition_cache offload_states reload_states
        compile deepspeed_io get_wall_clock_timers module_state_dict load_module_state_dict
        save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        load_checkpoint(load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
        load_module_only, custom_load_fn) save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)
        save_fp16_model train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
        zero_optimization_stage fp16_enabled bfloat16_enabled config monitor""",
    PipelineEngine: "train_batch(data_iter) eval_batch(data_iter) set_dataloader set_dataiterator set_batch_fn",
    type(get_accelerator()): """device_name is_available device_count communication_backend_name is_fp16_supported
        is_bf16_supported set_device""",
}
FAIRSCALE = {
    "fairscale.optim": "OSS AdaScale",
    "fairscale.optim.oss": """OSS(params, optim, group, broadcast_buffer_size, broadcast_fp16,
        force_broadcast_object)""",
    "fairscale.optim.grad_scaler": "ShardedGradScaler GradScaler",
    "fairscale.optim.adascale": """AdaScale(optimizer, world_size, scale, smoothing, num_gradients_to_accumulate,
        is_scaled_loss, debias_ewma) AdaScaleWrapper""",
    "fairscale.nn": """ShardedDataParallel(module, sharded_optimizer, process_group, broadcast_buffers,
        sync_models_at_startup, reduce_buffer_size, auto_refresh_trainable, reduce_fp16,
        warn_on_trainable_params_changed) FullyShardedDataParallel checkpoint_wrapper(module, offload_to_cpu)
        auto_wrap(module, auto_wrap_policy) enable_wrap wrap default_auto_wrap_policy config_auto_wrap_policy
        Pipe(module, balance, devices, chunks, checkpoint, deferred_batch_norm)""",
    "fairscale.nn.pipe.skip": "skippable stash pop Namespace verify_skippables",
    "fairscale.nn.pipe.balance": "balance_by_time balance_by_size",
    "fairscale.nn.model_parallel.initialize": "initialize_model_parallel get_model_parallel_group",
    "fairscale.nn.model_parallel.layers": """ColumnParallelLinear RowParallelLinear VocabParallelEmbedding
        ParallelEmbedding""",
    "fairscale.nn.model_parallel.cross_entropy": "vocab_parallel_cross_entropy",
}

Surface = tuple[Callable[[], Mapping[str, Mapping[str, Any]]], Mapping[str, str], Mapping[type, str], str]
SURFACES: dict[str, Surface] = {
    "horovod": (horovod_modules.namespaces, HOROVOD, HOROVOD_METHODS, "from-horovod.md"),
    "deepspeed": (deepspeed_modules.namespaces, DEEPSPEED, DEEPSPEED_METHODS, "from-deepspeed.md"),
    "fairscale": (fairscale_modules.namespaces, FAIRSCALE, {}, "from-fairscale.md"),
}


def calls_in(text: str) -> dict[str, list[str]]:
    """`name(argument, …) name` as a dict."""
    return {
        name: [one.strip() for one in arguments.split(",")] if arguments else []
        for name, arguments in re.findall(r"(\w+)(?:\(([^)]*)\))?", text)
    }


def lacking(value: Any, arguments: list[str]) -> list[str]:
    """Arguments that a call does not take by name."""
    if not arguments:
        return []
    taken = inspect.signature(value).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return []
    return [name for name in arguments if name not in taken]


def rows_of(guide: str) -> tuple[set[str], set[str]]:
    """The names in the first column of the guide's tables of calls: those with yes, and those with no."""
    yes: set[str] = set()
    no: set[str] = set()
    for line in (ROOT / "docs" / "guides" / guide).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 2 and re.match(r"(yes|no)\b", cells[1]):
            found = {part for code in re.findall(r"`([^`]*)`", cells[0]) for part in re.findall(r"\w+…?", code)}
            (yes if cells[1].startswith("yes") else no).update(found)
    return yes, no


@pytest.mark.parametrize("library", SURFACES)
def test_every_call_is_there_with_its_arguments(library: str) -> None:
    namespaces, modules, classes, _ = SURFACES[library]
    found = namespaces()
    problems = []
    for module, text in modules.items():
        for name, arguments in calls_in(text).items():
            value = found[module].get(name)
            value = found.get(f"{module}.{name}") if value is None else value
            if value is None:
                problems.append(f"{module}.{name}")
            elif lacking(value, arguments):
                problems.append(f"{module}.{name} takes no {lacking(value, arguments)}")
    for kind, text in classes.items():
        for name, arguments in calls_in(text).items():
            if not hasattr(kind, name):
                problems.append(f"{kind.__name__}.{name}")
            elif lacking(getattr(kind, name), arguments):
                problems.append(f"{kind.__name__}.{name} takes no {lacking(getattr(kind, name), arguments)}")
    assert problems == []


@pytest.mark.parametrize("library", SURFACES)
def test_the_guide_lists_every_call(library: str) -> None:
    _, modules, classes, guide = SURFACES[library]
    yes, no = rows_of(guide)
    prefixes = tuple(name.removesuffix("…") for name in yes if name.endswith("…"))
    names = {name for text in (*modules.values(), *classes.values()) for name in calls_in(text)}
    hidden = {"__version__", "__len__", "logger", *("config", "forward", "eval_batch")}
    missing = {name for name in names - yes - hidden if not (prefixes and name.startswith(prefixes))}
    assert missing == set()
    assert names & (no - yes) == set()
