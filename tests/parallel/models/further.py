"""Tiny models of architectures of transformers that nobody here has looked at, made from their own configs.

A config class says what its settings are called; the sizes below are given to those that it has. Imported on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.parallel.models.model_matrix import AXES, train_alone, train_cell
from tests.parallel.models.zoo import (
    CLASSES,
    SPECIMENS,
    VOCABULARY,
    Specimen,
    class_batch,
    image_batch,
    quiet_imports,
    text_batch,
)

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("attention_hidden_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "hidden_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size"), 8),
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "moe_layer_end_index": 3,
    "rotary_dim": 4,
    "sliding_window": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "BigBird": {"attention_type": "original_full"},
    "Esm": {"mask_token_id": 3},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "Longformer": {"attention_window": 4, "max_position_embeddings": 70},
    "Mamba2": {"num_heads": 8, "n_groups": 1},
}
"""Settings that a family needs beyond its sizes."""

DECODERS = [
    "Apertus",
    "Arcee",
    "BioGpt",
    "BitNet",
    "CodeGen",
    "Cohere",
    "Cohere2",
    "CpmAnt",
    "Cwm",
    "DiffLlama",
    "Doge",
    "Ernie4_5",
    "Exaone4",
    "Gemma",
    "Glm",
    "Glm4",
    "GPTBigCode",
    "GPTJ",
    "Granite",
    "Helium",
    "HunYuanDenseV1",
    "Jamba",
    "Lfm2",
    "Mamba",
    "Mamba2",
    "Ministral",
    "Mpt",
    "NanoChat",
    "Nemotron",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "Persimmon",
    "RecurrentGemma",
    "SeedOss",
    "SmolLM3",
    "StableLm",
    "Starcoder2",
    "VaultGemma",
    "XGLM",
]
WITH_EXPERTS = [
    "Dots1",
    "Ernie4_5_Moe",
    "FlexOlmo",
    "Glm4Moe",
    "GraniteMoe",
    "GraniteMoeShared",
    "HunYuanMoEV1",
    "JetMoe",
    "MiniMax",
    "MiniMaxM2",
    "Olmoe",
    "Qwen3Next",
]
ENCODERS = [
    "Albert",
    "BigBird",
    "Camembert",
    "ConvBert",
    "DebertaV2",
    "DistilBert",
    "Electra",
    "Ernie",
    "Esm",
    "Longformer",
    "ModernBert",
    "MPNet",
    "Nystromformer",
    "Roberta",
    "RoFormer",
    "XLMRoberta",
]
OF_IMAGES = ["Beit", "DeiT", "Dinov2", "PoolFormer", "ViTMSN"]
BOTH_WAYS = ["Bart", "BlenderbotSmall", "LED", "M2M100", "MBart", "MT5", "Pegasus", "UMT5"]
FAMILIES = [*DECODERS, *WITH_EXPERTS, *ENCODERS, *OF_IMAGES, *BOTH_WAYS]


def further(family: str) -> Specimen:
    """A tiny model of the family, as the matrix of models takes it."""
    if family in ENCODERS:
        build = _builder(f"{family}ForSequenceClassification", family)
        return Specimen(family, build, class_batch, is_decoder=False)
    if family in OF_IMAGES:
        return Specimen(family, _builder(f"{family}ForImageClassification", family), image_batch, is_decoder=False)
    if family in BOTH_WAYS:
        return Specimen(family, _builder(f"{family}ForConditionalGeneration", family), text_batch, is_decoder=False)
    build = _builder(f"{family}ForCausalLM", family)
    return Specimen(family, build, text_batch, has_experts=family in WITH_EXPERTS)


def _builder(model_class: str, family: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with quiet_imports():
            import transformers

            config_class = getattr(transformers, f"{family}Config")
            default = config_class()
            settings = {name: value for name, value in _SIZES.items() if hasattr(default, name)}
            kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
            if kinds and not isinstance(getattr(config_class, "layer_types", None), property):
                settings["layer_types"] = [kinds[layer % len(kinds)] for layer in range(4)]
            config = config_class(**{**settings, **_OWN.get(family, {})})
            for key in list(vars(config)):
                if "drop" in key and isinstance(getattr(config, key), float):
                    setattr(config, key, 0.0)
            model: nn.Module = getattr(transformers, model_class)(config)
        return model.train()

    return build


def train_further(family: str) -> dict[str, str]:
    """What became of the family on every axis, in words."""
    SPECIMENS[family] = further(family)
    expected = train_alone(family)
    fitting = [name for name, axis in AXES.items() if axis.applies(SPECIMENS[family])]
    return {axis: train_cell(family, axis).verdict(expected) for axis in fitting}
