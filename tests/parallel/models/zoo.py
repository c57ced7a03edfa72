"""Tiny models with random weights, as people build them: architectures of transformers and torchvision.

Imported on the ranks; a builder imports its library when it is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH, CLASSES = 96, 8, 4, 6

Batch = dict[str, Tensor]

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Specimen:
    """One architecture: how it is built and what it is fed."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    has_experts: bool = False
    is_decoder: bool = True
    is_from_torchvision: bool = False
    num_microbatches: int = 4
    """In a pipeline; 1 for models with batch norms, which would see the statistics of a microbatch."""


def text_batch(generator: torch.Generator) -> Batch:
    """Token ids that are their own labels; no padding."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def class_batch(generator: torch.Generator) -> Batch:
    """Token ids with a class each."""
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}


def image_batch(generator: torch.Generator) -> Batch:
    """Images with a class each."""
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}


class WithLoss(nn.Module):
    """A classifier of torchvision that returns its loss, as a user's script would write it.

    In double precision: the small images of these tests amplify the rounding of a deep ResNet beyond the tolerance.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.double()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(pixel_values.double()), labels)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Warnings are errors in tests, but those of other libraries while they are imported are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def transformer(model_class: str, config_class: str, **settings: Any) -> Callable[[], nn.Module]:
    """A builder of a model of transformers, with dropout off."""

    def build() -> nn.Module:
        with quiet_imports():
            import transformers

            config = getattr(transformers, config_class)(**settings)
            for key in vars(config):
                if "drop" in key and isinstance(getattr(config, key), float):
                    setattr(config, key, 0.0)
            model: nn.Module = getattr(transformers, model_class)(config)
        return model.train()

    return build


def vision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A builder of a model of torchvision."""

    def build() -> nn.Module:
        with quiet_imports():
            import torchvision

        return WithLoss(getattr(torchvision.models, name)(num_classes=CLASSES, **settings))

    return build


def decoder(family: str, **settings: Any) -> Callable[[], nn.Module]:
    """A builder of `<family>ForCausalLM`."""
    return transformer(f"{family}ForCausalLM", f"{family}Config", **{**_TEXT, **settings})


_VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_labels": CLASSES,
}
_ENCODER: Mapping[str, Any] = {**_TEXT, "num_labels": CLASSES}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    **_EXPERTS,
}

SPECIMENS: dict[str, Specimen] = {
    one.name: one
    for one in (
        Specimen("Llama", decoder("Llama"), text_batch),
        Specimen("Mistral", decoder("Mistral", head_dim=8), text_batch),
        Specimen("Qwen2", decoder("Qwen2"), text_batch),
        Specimen("Qwen3", decoder("Qwen3", head_dim=8), text_batch),
        Specimen("Gemma2", decoder("Gemma2", head_dim=8, tie_word_embeddings=True), text_batch),
        Specimen("Gemma3", transformer("Gemma3ForCausalLM", "Gemma3TextConfig", **_TEXT, head_dim=8), text_batch),
        Specimen("Phi", decoder("Phi"), text_batch),
        Specimen("Phi3", decoder("Phi3"), text_batch),
        Specimen(
            "GPT-2",
            transformer("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4),
            text_batch,
        ),
        Specimen(
            "GPT-Neo",
            decoder("GPTNeo", num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=4),
            text_batch,
        ),
        Specimen("GPT-NeoX", decoder("GPTNeoX"), text_batch),
        Specimen("OPT", decoder("OPT", ffn_dim=48, word_embed_proj_dim=32), text_batch),
        Specimen(
            "BLOOM",
            transformer("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=32, n_layer=4, n_head=4),
            text_batch,
        ),
        Specimen("Falcon", decoder("Falcon", new_decoder_architecture=True, num_kv_heads=2), text_batch),
        Specimen(
            "BERT",
            transformer("BertForSequenceClassification", "BertConfig", **_ENCODER),
            class_batch,
            is_decoder=False,
        ),
        Specimen(
            "T5",
            transformer(
                "T5ForConditionalGeneration",
                "T5Config",
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            ),
            text_batch,
            is_decoder=False,
        ),
        Specimen(
            "ViT",
            transformer("ViTForImageClassification", "ViTConfig", **_VIT, image_size=32, patch_size=8),
            image_batch,
            is_decoder=False,
        ),
        Specimen(
            "Mixtral", decoder("Mixtral", num_local_experts=4, num_experts_per_tok=2), text_batch, has_experts=True
        ),
        Specimen(
            "Qwen2-MoE",
            decoder("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=32, **_EXPERTS),
            text_batch,
            has_experts=True,
        ),
        Specimen("Qwen3-MoE", decoder("Qwen3Moe", num_experts=4, head_dim=8, **_EXPERTS), text_batch, has_experts=True),
        Specimen(
            "gpt-oss",
            decoder("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
            text_batch,
            has_experts=True,
        ),
        Specimen("DeepSeek-V3", decoder("DeepseekV3", **_DEEPSEEK), text_batch, has_experts=True),
        Specimen(
            "ResNet-18",
            vision("resnet18", norm_layer=partial(nn.GroupNorm, 8)),
            image_batch,
            is_decoder=False,
            is_from_torchvision=True,
            num_microbatches=1,
        ),
        Specimen(
            "torchvision ViT",
            vision(
                "VisionTransformer", image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=32, mlp_dim=64
            ),
            image_batch,
            is_decoder=False,
            is_from_torchvision=True,
        ),
        Specimen(
            "Swin",
            vision(
                "SwinTransformer",
                patch_size=[2, 2],
                embed_dim=16,
                depths=[2, 2],
                num_heads=[2, 4],
                window_size=[4, 4],
                stochastic_depth_prob=0.0,
            ),
            image_batch,
            is_decoder=False,
            is_from_torchvision=True,
        ),
    )
}
