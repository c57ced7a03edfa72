"""Small models of transformers with random weights, batches for them, and one process's training of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, BATCH, LAYERS = 64, 16, 8, 4
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
LAYER_TYPES = ["sliding_attention", "full_attention"] * (LAYERS // 2)
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _config(name: str) -> tuple[str, dict[str, Any]]:
    """The class of a model, and what its config is made of."""
    return {
        "llama": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
        "qwen2": ("Qwen2ForCausalLM", GROUPED),
        "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
        "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 6}),
        "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "sliding_window": None}),
        "gemma2": (
            "Gemma2ForCausalLM",
            {**GROUPED, "head_dim": 8, "sliding_window": 6, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 8},
        ),
        "gemma3": (
            "Gemma3ForCausalLM",
            {**GROUPED, "head_dim": 8, "sliding_window": 6, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 8},
        ),
        "gpt2": (
            "GPT2LMHeadModel",
            {
                "vocab_size": VOCABULARY,
                "n_embd": 32,
                "n_layer": LAYERS,
                "n_head": 4,
                "n_positions": 64,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        "opt": (
            "OPTForCausalLM",
            {
                **{key: value for key, value in SMALL.items() if key != "intermediate_size"},
                "ffn_dim": 48,
                "word_embed_proj_dim": 16,
                "dropout": 0.0,
            },
        ),
        "gpt_neox": ("GPTNeoXForCausalLM", {**SMALL, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
        "bert": ("BertForMaskedLM", {**SMALL, **NO_DROPOUT}),
        "vit": (
            "ViTForImageClassification",
            {
                "hidden_size": 32,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "image_size": 16,
                "patch_size": 4,
                **NO_DROPOUT,
            },
        ),
        "t5": ("T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": 32, "d_ff": 48, "num_layers": 2}),
        "mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
        "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    }[name]


DECODERS = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3", "gpt2", "opt", "gpt_neox")


def tiny(name: str, **changes: Any) -> nn.Module:
    """The model that every rank and the single process start from."""
    kind, values = _config(name)
    ids = {} if name == "vit" else {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    with warnings.catch_warnings():
        # Of libraries that transformers imports, as they are compiled.
        warnings.simplefilter("ignore")
        import transformers
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread that watches progress bars
        made = getattr(transformers, kind)
        torch.manual_seed(7)
        model: nn.Module = made(made.config_class(**{**ids, **values, **changes}))
    return model.train()


def tiny_batches(
    name: str, num_steps: int, *, padded: bool = False, even: bool = False, batch: int = BATCH
) -> list[dict[str, Tensor]]:
    """Batches with labels; those of some tokens do not count, a different number in each row, unless `even`.

    `padded`: rows end in padding of different lengths.
    """
    generator = torch.Generator().manual_seed(3)
    if name == "vit":
        return [
            {
                "pixel_values": torch.randn(batch, 3, 16, 16, generator=generator),
                "labels": torch.randint(2, (batch,), generator=generator),
            }
            for _ in range(num_steps)
        ]
    out = []
    for _ in range(num_steps):
        ids = torch.randint(3, VOCABULARY, (batch, LENGTH), generator=generator)
        labels = ids.clone()
        if not even:
            for row in range(batch):
                labels[row, : row % 5] = -100
            labels[batch - 1] = -100
        made = {"input_ids": ids, "labels": labels}
        if padded:
            mask = torch.ones_like(ids)
            for row in range(batch):
                mask[row, LENGTH - row % 4 - (row % 2) * 3 :] = 0
            mask[0] = 1
            labels[mask == 0] = -100
            ids[mask == 0] = 0
            made["attention_mask"] = mask
        if name == "bert":
            made["token_type_ids"] = (torch.arange(LENGTH) > LENGTH // 2).long().expand(batch, -1).contiguous()
        out.append(made)
    return out


def next_tokens(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """The same batch as inputs and targets, for a loss function."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    return inputs, functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def token_loss(output: Any, targets: Tensor) -> Tensor:
    """A user's loss of a causal model's output."""
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def losses_alone(
    model: nn.Module, batches: list[Any], *, loss_fn: Callable[..., Tensor] | None = None, clip: float = 0.5
) -> list[float]:
    """Losses and gradient norms, one after the other, of plain torch in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    out = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss if loss_fn is None else loss_fn(model(**batch[0]), batch[1])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        out += [loss.item(), norm.item()]
    return out
