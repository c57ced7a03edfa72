"""Every key of a DeepSpeed config, of the newest version and of older ones whose files are still about."""

from __future__ import annotations

from torsh_distributed.migrate.deepspeed.config import section_keys as section
from torsh_distributed.migrate.deepspeed.config.setting import SettingGroup, anything, flag, number, text, whole
from torsh_distributed.migrate.deepspeed.config.zero_keys import ZERO

_NOT_QUANTIZED = "quantization during training is not done here: see torchao, and precision.dtype = fp8"

KNOWN = SettingGroup(
    settings={
        "train_batch_size": whole(least=1),
        "train_micro_batch_size_per_gpu": whole(least=1),
        "gradient_accumulation_steps": whole(least=1),
        "managed_gradient_accumulation": flag(True),
        "optimizer": SettingGroup(
            settings={
                "type": text(),
                "params": SettingGroup(settings={}, is_open=True),
                "legacy_fusion": flag().hint("the optimizer is torch's"),
            }
        ),
        "scheduler": SettingGroup(
            settings={"type": text(), "params": SettingGroup(settings={}, is_open=True)},
        ),
        "gradient_clipping": number(1.0, least=0),
        "fp16": section.FP16,
        "bf16": section.BF16,
        "bfloat16": section.BF16,
        "amp": section.AMP,
        "torch_autocast": section.AUTOCAST,
        "data_types": section.DATA_TYPES,
        "communication_data_type": text(None, "fp16", "bf16", "fp32"),
        "seq_parallel_communication_data_type": text("fp32", "fp16", "bf16", "fp32").hint(
            "activations travel in the format they have"
        ),
        "prescale_gradients": flag().equivalent("", "the mean is the same, and sums are fp32 unless asked otherwise"),
        "gradient_predivide_factor": number(1.0).equivalent("", "the mean is the same"),
        "gradient_allreduce_op": text("mean", "mean", "sum"),
        "sparse_gradients": flag().hint("gradients of embeddings travel dense: the result is the same"),
        "zero_optimization": ZERO,
        "zero_allow_untested_optimizer": flag().honoured("", "every torch optimizer is allowed"),
        "zero_force_ds_cpu_optimizer": flag(True).equivalent("td.train.CpuAdam", "Adam on the host is CpuAdam"),
        "activation_checkpointing": section.ACTIVATIONS,
        "steps_per_print": whole(least=1),
        "wall_clock_breakdown": flag().equivalent("TORSH_EVENTS_DIR=DIR", "`torsh trace` has the times of a step"),
        "memory_breakdown": flag().equivalent("TORSH_EVENTS_DIR=DIR", "memory is sampled with every step"),
        "dump_state": flag().honoured("torsh plan show", "prints every key"),
        "log_level": text().honoured("TORSH_LOG"),
        "disable_allgather": flag().hint("shards are always all-gathered"),
        "disable_python_gc": flag().hint("Python's collector is left as it is"),
        "vocabulary_size": whole(),
        "dataloader_drop_last": flag().equivalent("DataLoader(drop_last=…)", "the loader is yours"),
        "graph_harvesting": flag().hint("", "compile.cuda_graphs"),
        "use_data_before_expert_parallelism": flag().hint("the mesh orders the ranks"),
        "tensorboard": section.TENSORBOARD,
        "wandb": section.WANDB,
        "csv_monitor": section.CSV,
        "comet": section.COMET,
        "comms_logger": section.COMMS_LOGGER,
        "flops_profiler": section.FLOPS,
        "timers": section.TIMERS,
        "elasticity": section.ELASTICITY,
        "checkpoint": section.CHECKPOINT,
        "nebula": SettingGroup(gate="enabled", settings={"enabled": flag()}, is_open=True),
        "datastates_ckpt": anything(),
        "aio": section.AIO,
        "pipeline": section.PIPELINE,
        "tensor_parallel": section.TENSOR,
        "expert_parallel": section.EXPERT,
        "sequence_parallel_size": whole(1, least=1),
        "data_parallel_size": whole(least=1),
        "compile": section.COMPILE,
        "hybrid_engine": section.HYBRID,
        "autotuning": section.AUTOTUNING,
        "data_efficiency": section.DATA_EFFICIENCY,
        "curriculum_learning": section.CURRICULUM,
        "progressive_layer_drop": section.LAYER_DROP,
        "compression_training": section.COMPRESSION_TRAINING,
        "quantize_training": SettingGroup(
            gate="enabled", settings={"enabled": flag().refused(_NOT_QUANTIZED)}, is_open=True
        ),
        "eigenvalue": section.EIGENVALUE,
        "weight_quantization": anything().refused("weights are not quantized for inference here: see torchao"),
        "sparse_attention": anything().refused("write the pattern as a mask of torch's FlexAttention"),
    }
)
"""The keys of the whole file."""
