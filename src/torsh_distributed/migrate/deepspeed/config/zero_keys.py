"""The keys of `zero_optimization`, with the verdicts that do not depend on others."""

from __future__ import annotations

from torsh_distributed.migrate.deepspeed.config.setting import SettingGroup, flag, number, text, whole, words

_BUCKETS = "what travels together is a layer here, not a number of elements: see fsdp.wrap"
_LAYERS = "a layer's parameters are gathered when it runs: see fsdp.max_gathered_ahead"
_ALWAYS = "FSDP2 always works this way"
_NO_LINEAR = "torch's linear layers keep no copy of their weight"
_DEVICES = ("none", "cpu", "nvme")

OFFLOAD_OPTIMIZER = SettingGroup(
    settings={
        "device": text("none", *_DEVICES),
        "nvme_path": text(),
        "buffer_count": whole(4).hint("the number of buffers follows the hit rate: see offload.prefetch_buffer_size"),
        "pin_memory": flag(True),
        "pipeline": flag(False).hint("the pager reads and writes in the background"),
        "pipeline_read": flag(False).hint("the pager reads in the background"),
        "pipeline_write": flag(False).hint("the pager writes in the background"),
        "fast_init": flag(False).hint("state is made where it lives"),
        "ratio": number(1.0, least=0),
        "super_offload": flag(False).hint("state on the host is updated by CpuAdam"),
        "cpuadam_cores_perc": number(0.8, least=0).hint("threads follow OMP_NUM_THREADS"),
    }
)
OFFLOAD_PARAM = SettingGroup(
    settings={
        "device": text("none", *_DEVICES),
        "nvme_path": text(),
        "buffer_count": whole(5).hint("the number of buffers follows the hit rate: see offload.prefetch_buffer_size"),
        "buffer_size": whole(int(1e8)).hint("a buffer is as large as the layer in it"),
        "max_in_cpu": whole(int(1e9)).hint("host memory is limited in bytes: see offload.cpu_memory_budget_gb"),
        "pin_memory": flag(True),
    }
)

ZERO = SettingGroup(
    settings={
        "stage": whole(0, choices=(0, 1, 2, 3)),
        "contiguous_gradients": flag(True).hint(_ALWAYS),
        "reduce_scatter": flag(True).hint("shards are always reduce-scattered"),
        "reduce_bucket_size": whole(int(5e8)).hint(_BUCKETS),
        "use_multi_rank_bucket_allreduce": flag(True).hint("shards are always reduce-scattered"),
        "allgather_partitions": flag(True).hint("shards are always all-gathered"),
        "allgather_bucket_size": whole(int(5e8)).hint(_BUCKETS),
        "overlap_comm": flag(None).hint("gradients always travel while backward still computes"),
        "compute_grad_norm": flag(True).hint("the norm is a by-product of clipping"),
        "load_from_fp32_weights": flag(True),
        "elastic_checkpoint": flag(False).honoured("", "checkpoints load at any world size"),
        "offload_param": OFFLOAD_PARAM,
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "zenflow": SettingGroup(settings={}, is_open=True),
        "sub_group_size": whole(int(1e9)).hint("the optimizer updates parameter by parameter"),
        "cpu_offload": flag(None),
        "cpu_offload_params": flag(None),
        "cpu_offload_param": flag(None),
        "cpu_offload_use_pin_memory": flag(None),
        "stage3_prefetch_bucket_size": whole(int(5e7)).hint(_LAYERS),
        "stage3_param_persistence_threshold": whole(int(1e5)).hint("small parameters are gathered with their layer"),
        "stage3_model_persistence_threshold": whole(2**63 - 1).hint("small parameters are gathered with their layer"),
        "stage3_max_live_parameters": whole(int(1e9)).hint(_LAYERS),
        "stage3_max_reuse_distance": whole(int(1e9)).hint(_LAYERS),
        "stage3_gather_16bit_weights_on_model_save": flag(False).honoured("engine.save", "`torsh checkpoint export`"),
        "stage3_gather_fp16_weights_on_model_save": flag(False).honoured("engine.save", "`torsh checkpoint export`"),
        "stage3_module_granularity_threshold": whole(0).hint(_LAYERS),
        "stage3_use_all_reduce_for_fetch_params": flag(False).hint("shards are always all-gathered"),
        "stage3_allgather_sequential": flag(False).hint(_LAYERS),
        "ignore_unused_parameters": flag(True),
        "legacy_stage1": flag(False).hint("there is one stage 1 here"),
        "round_robin_gradients": flag(False).hint("a rank copies its own shards only"),
        "parameter_alignment": flag(False).hint("FSDP2 pads shards itself"),
        "zero_hpz_partition_size": whole(1),
        "zero_quantized_weights": flag(False),
        "zero_quantized_nontrainable_weights": flag(False).refused(
            "frozen weights are not stored in 8 bits: quantize them with torchao or bitsandbytes"
        ),
        "zero_quantized_gradients": flag(False),
        "zeropp_loco_param": SettingGroup(settings={"err_beta": number(0.8), "reset_T": whole(1024)}),
        "mics_shard_size": whole(-1, least=-1),
        "mics_hierarchical_params_gather": flag(False).hint("the backend decides how shards are gathered"),
        "memory_efficient_linear": flag(True).hint(_NO_LINEAR),
        "pipeline_loading_checkpoint": flag(False).hint("every rank reads its own part"),
        "override_module_apply": flag(True).hint("modules are built as torch builds them"),
        "log_trace_cache_warnings": flag(False).hint("there is no trace of modules to warn about"),
        "enable_sanity_checks": flag(False).equivalent("TORSH_DEBUG=1", "it compares every collective across ranks"),
        "save_muon_momentum_buffer_in_memory": flag(False).hint("offload decides by budget"),
        "leaf_module": SettingGroup(
            settings={
                name: words().hint("a module inside a layer is gathered with the layer: see fsdp.wrap")
                for name in ("classes", "names", "name_suffixes")
            },
        ),
    }
)
