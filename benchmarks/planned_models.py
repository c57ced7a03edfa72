"""Models for `planner`: of transformers but for one, small enough for two cores; and what a rank does with one."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.planner.live_memory import LiveMemory, char_gpt
from torsh_distributed.plan import Plan
from torsh_distributed.planner.model.example_batch import batch_shape
from torsh_distributed.train import parallelize

Build = Callable[[], nn.Module]
BATCH = 8
_LENGTH = 128


def _made(name: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    return model


def llama() -> nn.Module:
    """Grouped heads, a gated feed-forward."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"vocab_size": 1024, "num_key_value_heads": 2, "max_position_embeddings": _LENGTH, "use_cache": False}
    return _made("LlamaForCausalLM", "LlamaConfig", **sizes, **more)


def qwen() -> nn.Module:
    """A head tied to the embedding."""
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6}
    more = {"vocab_size": 2048, "num_key_value_heads": 2, "max_position_embeddings": _LENGTH, "use_cache": False}
    return _made("Qwen2ForCausalLM", "Qwen2Config", **sizes, **more, tie_word_embeddings=True)


def bert() -> nn.Module:
    """Dropout, attention in both directions."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    return _made("BertForMaskedLM", "BertConfig", **sizes, vocab_size=1024, max_position_embeddings=_LENGTH)


def vit() -> nn.Module:
    """Images."""
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 3}
    return _made("ViTForImageClassification", "ViTConfig", **sizes, image_size=64, patch_size=8, num_labels=10)


def t5() -> nn.Module:
    """An encoder and a decoder."""
    sizes = {"d_model": 192, "d_kv": 32, "d_ff": 768, "num_layers": 3, "num_heads": 6, "vocab_size": 1024}
    return _made("T5ForConditionalGeneration", "T5Config", **sizes, n_positions=64, decoder_start_token_id=0)


def gpt2() -> nn.Module:
    """Fused projections, dropout, a tied head."""
    sizes = {"n_embd": 192, "n_layer": 4, "n_head": 6, "vocab_size": 1024, "n_positions": _LENGTH}
    return _made("GPT2LMHeadModel", "GPT2Config", **sizes, use_cache=False)


def neox() -> nn.Module:
    """Attention and feed-forward side by side."""
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 6}
    more = {"vocab_size": 1024, "max_position_embeddings": _LENGTH, "use_cache": False}
    return _made("GPTNeoXForCausalLM", "GPTNeoXConfig", **sizes, **more)


def opt() -> nn.Module:
    """Learned positions, ReLU."""
    sizes = {"hidden_size": 192, "ffn_dim": 768, "num_hidden_layers": 4, "num_attention_heads": 6}
    more = {"vocab_size": 1024, "max_position_embeddings": _LENGTH, "word_embed_proj_dim": 192, "use_cache": False}
    return _made("OPTForCausalLM", "OPTConfig", **sizes, **more)


def gemma() -> nn.Module:
    """Heads that are wider than the hidden size allows, a wide gated feed-forward."""
    sizes = {"hidden_size": 192, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": _LENGTH}
    return _made("GemmaForCausalLM", "GemmaConfig", **sizes, **more, use_cache=False)


def mixtral() -> nn.Module:
    """Experts."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 1024, "max_position_embeddings": _LENGTH}
    return _made("MixtralForCausalLM", "MixtralConfig", **sizes, **more, use_cache=False)


def bart() -> nn.Module:
    """An encoder and a decoder with learned positions."""
    sizes = {"d_model": 192, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 768, "decoder_ffn_dim": 768}
    more = {"encoder_attention_heads": 6, "decoder_attention_heads": 6, "vocab_size": 1024}
    return _made("BartForConditionalGeneration", "BartConfig", **sizes, **more, max_position_embeddings=_LENGTH)


MODELS: dict[str, Build] = {
    "character GPT": char_gpt,
    "Llama": llama,
    "Qwen2": qwen,
    "BERT": bert,
    "ViT": vit,
    "T5": t5,
    "GPT-2": gpt2,
    "GPT-NeoX": neox,
    "OPT": opt,
    "Gemma": gemma,
    "Mixtral": mixtral,
    "BART": bart,
}


def _batch(model: nn.Module, plan: Plan) -> Any:
    """One rank's samples of a step."""
    return _made_batch(model, BATCH // plan.resolve(dist.get_world_size()).mesh.data_degree)


def _made_batch(model: nn.Module, num_samples: int) -> Any:
    """Samples, with labels where the model computes its loss from them."""
    shape = batch_shape(model)
    made = shape.make(num_samples)
    if shape.has_labels:
        return made
    if "pixel_values" in made:
        return {**made, "labels": torch.zeros(num_samples, dtype=torch.int64)}
    (ids,) = made.values()
    return ids, ids


def _loss(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), targets.flatten())


def _engine(model: nn.Module, plan: Plan, batch: Any) -> Any:
    loss = None if isinstance(batch, dict) else _loss
    return parallelize(model, torch.optim.AdamW, plan, loss_fn=loss)


def measured_peak(build: Build, plan: Plan) -> int:
    """Runs on every rank: the peak of the third step, counted by storages, parameters and state included."""
    with LiveMemory() as live:
        model = build()
        batch = _batch(model, plan)
        engine = _engine(model, plan, batch)
        del model
        for _ in range(3):
            gc.collect()
            live.peak = live.now
            engine.step(batch)
        return live.peak


def tracked_peak(build: Build) -> int | None:
    """What torch's own tracker counts in the second step of a plain loop in one process, on tensors without data.

    It follows one pass in a step and no recomputing. None for a model that does not run without data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    try:
        with FakeTensorMode():
            model = build()
            optimizer = torch.optim.AdamW(model.parameters())
            batch = _made_batch(model, BATCH)
            tracker.track_external(model, optimizer)
            with tracker:
                for _ in range(2):
                    tracker.reset_mod_stats()
                    loss = model(**batch).loss if isinstance(batch, dict) else _loss(model(batch[0]), batch[1])
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    except RuntimeError:  # an operation that reads values, or is not known of tensors without any
        return None
    return max(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


def measured_step_s(build: Build, plan: Plan, num_threads: int, num_steps: int) -> float:
    """Runs on every rank: the median step after two, which allocate and connect."""
    torch.set_num_threads(num_threads)
    model = build()
    batch = _batch(model, plan)
    engine = _engine(model, plan, batch)
    taken = []
    for _ in range(num_steps + 2):
        dist.barrier()
        started = time.perf_counter()
        engine.step(batch)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])
