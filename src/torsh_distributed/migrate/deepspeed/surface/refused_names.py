"""What of DeepSpeed has no counterpart here: a name that raises when it is used, with what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from torsh_distributed.errors import FeatureNotAvailable

_REFUSED = {
    "deepspeed": {
        "init_inference": "this engine trains: serve the model with vLLM or torch.compile",
        "tp_model_init": "use mesh.tp of a plan, through torsh_distributed.parallelize",
        "InferenceEngine": "this engine trains: serve the model with vLLM or torch.compile",
        "DeepSpeedHybridEngine": "train and generate with one engine: call engine.module.generate",
        "DeepSpeedTransformerLayer": "use torch.nn.TransformerEncoderLayer, or a model of transformers",
        "DeepSpeedTransformerConfig": "use torch.nn.TransformerEncoderLayer, or a model of transformers",
        "replace_transformer_layer": "use torch.compile",
        "module_inject": "use torch.compile",
    }
}

LATER_REFUSED = {
    "deepspeed.ops.sparse_attention": "DeepSpeed's sparse attention is compiled code: use torch's FlexAttention",
    "deepspeed.ops.transformer": "DeepSpeed's fused layers are compiled code: use torch.nn or transformers",
    "deepspeed.ops.op_builder": "nothing is compiled here: FusedAdam and DeepSpeedCPUAdam work as they are",
    "deepspeed.ops.aio": "use the plan's section offload for state on disk",
    "deepspeed.ops.quantizer": "quantise with torchao",
    "deepspeed.ops.fp_quantizer": "quantise with torchao",
    "deepspeed.ops.evoformer_attn": "DeepSpeed's evoformer attention is compiled code: use torch's FlexAttention",
    "deepspeed.inference": "this engine trains: serve the model with vLLM or torch.compile",
    "deepspeed.module_inject": "use torch.compile",
    "deepspeed.compression": "quantise or prune with torchao",
    "deepspeed.autotuning": "let `torsh plan` choose",
    "deepspeed.runtime.hybrid_engine": "train and generate with one engine: call engine.module.generate",
    "deepspeed.runtime.sequence_parallel": "use mesh.cp of a plan, through torsh_distributed.parallelize",
    "deepspeed.sequence": "use mesh.cp of a plan, through torsh_distributed.parallelize",
    "deepspeed.linear": "use PEFT",
}
"""Modules whose import is refused, with what to do instead."""


def refused_names(module: str) -> dict[str, Any]:
    """The names of a module that raise when they are called."""
    return {name: RefusedName(f"{module}.{name}", hint) for name, hint in _REFUSED[module].items()}


class RefusedName:
    """Stands for a name of DeepSpeed; importing it is harmless, using it raises FeatureNotAvailable."""

    def __init__(self, name: str, hint: str) -> None:
        self._name, self._hint = name, hint

    def _refuse(self) -> NoReturn:
        raise FeatureNotAvailable(f"{self._name} is not part of torsh_distributed's deepspeed", hint=self._hint)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        """Refuse, unless Python itself asks."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()
