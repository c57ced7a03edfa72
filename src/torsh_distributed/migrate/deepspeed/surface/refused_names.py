"""What of DeepSpeed is not here, each with a sentence that says what to use."""

from __future__ import annotations

from typing import Any, NoReturn

from torsh_distributed.errors import FeatureNotAvailable

_SERVES = "this engine trains: serve the model with vLLM or torch.compile"
_LAYERS = "use torch.nn.TransformerEncoderLayer, or a model of transformers"
_SPLITS = "use mesh.tp of a plan, through torsh_distributed.parallelize"
_SEQUENCES = "use mesh.cp of a plan, through torsh_distributed.parallelize"
_READS = "torsh_distributed.migrate.deepspeed.open_checkpoint reads checkpoints, universal ones too"
_DROPS = "random layer token drop changes the model's layers: not done here"
_SMALLER = "quantise or prune with torchao"
_RECOMPUTES = "call deepspeed.checkpointing.checkpoint"
_DEVICE = "the accelerator is the one that torch finds"
_FILES = "checkpoints of this engine have other files: get_fp32_state_dict_from_zero_checkpoint reads both kinds"
_CUTS = "use the pipeline schedules of a plan: pipeline.schedule"

REFUSED = {
    "deepspeed": {
        "init_inference": _SERVES,
        "tp_model_init": _SPLITS,
        "set_autotp_mode": _SPLITS,
        "InferenceEngine": _SERVES,
        "DeepSpeedInferenceConfig": _SERVES,
        "default_inference_config": _SERVES,
        "DeepSpeedHybridEngine": "train and generate with one engine: call engine.module.generate",
        "DualPipeVEngine": _CUTS,
        "DualPipeVModule": _CUTS,
        "DeepSpeedTransformerLayer": _LAYERS,
        "DeepSpeedTransformerConfig": _LAYERS,
        "replace_transformer_layer": "use torch.compile",
        "revert_transformer_layer": "use torch.compile",
        "module_inject": "use torch.compile",
    },
    "deepspeed.compression.compress": {"init_compression": _SMALLER, "redundancy_clean": _SMALLER},
    "deepspeed.compression.helper": {"convert_conv1d_to_linear": _SMALLER},
    "deepspeed.launcher.runner": {"main": "start workers with `torsh run --as deepspeed`"},
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": {"RandomLayerTokenDrop": _DROPS},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "convert_to_random_ltd": _DROPS,
        "save_without_random_ltd": _DROPS,
    },
    "deepspeed.utils.zero_to_fp32": {
        "get_model_state_file": _FILES,
        "get_model_state_files": _FILES,
        "get_optim_files": _FILES,
        "get_checkpoint_files": _FILES,
    },
    "deepspeed.checkpoint": {
        "DeepSpeedCheckpoint": _READS,
        "ZeROCheckpoint": _READS,
        "enable_universal_checkpoint": "engine.load_checkpoint reads universal checkpoints as they are",
        "get_layer_ckpt_name_for_rank": _READS,
        "get_model_ckpt_name_for_rank": _READS,
        "get_zero_ckpt_name_for_rank": _READS,
        "get_model_3d_descriptor": _READS,
        "model_3d_desc": _READS,
        "merge_state": _READS,
        "reshape_meg_2d_parallel": _READS,
    },
    "deepspeed.ops.adam": {
        "ZenFlowCPUAdam": "use DeepSpeedCPUAdam",
        "ZenFlowSelectiveAdamW": "use FusedAdam",
        "ZenFlowSelectiveAdamW_stage3": "use FusedAdam",
    },
    "deepspeed.runtime.utils": {
        "CheckOverflow": "the engine checks gradients in step(): engine.optimizer.overflow says what it found",
        "PartitionedTensor": "activations travel whole between stages",
    },
    "deepspeed.runtime.sparse_tensor": {"SparseTensor": "use torch.sparse_coo_tensor"},
    "deepspeed.runtime.zero.mics": {"MiCS_Optimizer": "zero_optimization.mics_shard_size makes groups of shards"},
    "deepspeed.accelerator": {"set_accelerator": _DEVICE},
    "deepspeed.accelerator.real_accelerator": {"set_accelerator": _DEVICE},
    "deepspeed.checkpointing": {"CheckpointFunction": _RECOMPUTES},
    "deepspeed.runtime.activation_checkpointing.checkpointing": {"CheckpointFunction": _RECOMPUTES},
    "deepspeed.utils.groups": {"initialize": "pass ep_size to deepspeed.moe.layer.MoE"},
    "engine": {
        "set_custom_curriculum_learning_schedule": "the section curriculum_learning has schedules for lengths",
        "set_data_post_process_func": "change batches in the script's own loop, or in collate_fn",
    },
}
"""Names that can be imported and raise when they are used; `engine`: methods."""

REFUSED_MODULES = {
    "deepspeed.ops.sparse_attention": "DeepSpeed's sparse attention is compiled code: use torch's FlexAttention",
    "deepspeed.ops.transformer": "DeepSpeed's fused layers are compiled code: use torch.nn or transformers",
    "deepspeed.ops.aio": "use the plan's section offload for state on disk",
    "deepspeed.ops.gds": "use the plan's section offload for state on disk",
    "deepspeed.ops.quantizer": "quantise with torchao",
    "deepspeed.ops.fp_quantizer": "quantise with torchao",
    "deepspeed.ops.random_ltd": _DROPS,
    "deepspeed.ops.deepspeed4science": "DeepSpeed's evoformer attention is compiled code: use torch's FlexAttention",
    "deepspeed.ops.evoformer_attn": "DeepSpeed's evoformer attention is compiled code: use torch's FlexAttention",
    "deepspeed.checkpoint.ds_to_universal": "a checkpoint of this engine loads at any world size and stage as it is",
    "deepspeed.inference": _SERVES,
    "deepspeed.model_implementations": _SERVES,
    "deepspeed.module_inject": "use torch.compile",
    "deepspeed.compression": _SMALLER,
    "deepspeed.autotuning": "`torsh plan` and `torsh tune` look for settings",
    "deepspeed.launcher": "start workers with `torsh run --as deepspeed`",
    "deepspeed.env_report": "`torsh doctor` looks at the machine",
    "deepspeed.nvme": "`torsh bench` measures the disk",
    "deepspeed.io": "checkpoints are written by this engine itself",
    "deepspeed.nebula": "checkpoints are written in the background: checkpoint.async_save of a plan",
    "deepspeed.runtime.pipe.schedule": _CUTS,
    "deepspeed.runtime.hybrid_engine": "train and generate with one engine: call engine.module.generate",
    "deepspeed.runtime.rollout": "train and generate with one engine: call engine.module.generate",
    "deepspeed.runtime.sequence_parallel": _SEQUENCES,
    "deepspeed.runtime.tensor_parallel": _SPLITS,
    "deepspeed.runtime.domino": _SPLITS,
    "deepspeed.runtime.zenflow": "important gradients are not updated apart from others here",
    "deepspeed.runtime.superoffload": "zero_optimization.offload_optimizer keeps state on the host",
    "deepspeed.runtime.swap_tensor": "zero_optimization.offload_optimizer with device nvme keeps state on disk",
    "deepspeed.runtime.comm": "compress gradients with a plan: compress.method",
    "deepspeed.runtime.quantize": "quantise with torchao",
    "deepspeed.runtime.eigenvalue": "quantise with torchao",
    "deepspeed.runtime.data_pipeline.data_sampling": "use a DataLoader, and CurriculumScheduler for lengths",
    "deepspeed.runtime.data_pipeline.data_routing": _DROPS,
    "deepspeed.sequence": _SEQUENCES,
    "deepspeed.linear": "use PEFT",
    "deepspeed.compile": "call engine.compile(), which is torch.compile",
}
"""Modules whose import raises."""


def refused_names(module: str) -> dict[str, Any]:
    """The names of a module that raise when they are used."""
    return {name: RefusedName(f"{module}.{name}", hint) for name, hint in REFUSED.get(module, {}).items()}


class RefusedName:
    """Stands for a name of DeepSpeed; importing it is harmless, using it raises FeatureNotAvailable."""

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def _refuse(self) -> NoReturn:
        raise FeatureNotAvailable(f"{self._name} is not part of torsh_distributed's deepspeed", hint=self._hint)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        """Nothing is one: `isinstance(model, deepspeed.InferenceEngine)` is a question that scripts ask."""
        return False

    def __getattr__(self, name: str) -> Any:
        """Refuse, unless Python itself asks."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
