"""Libraries that take seconds to import: `world.run(…, imports=TRANSFORMERS)` does so once, before ranks are forked."""

from __future__ import annotations

_MODELS = ("llama", "gpt2", "bert", "mistral", "gemma3", "t5", "mixtral", "qwen3_moe", "deepseek_v3")

TRANSFORMERS = ("transformers", *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS))
LLAVA = (*TRANSFORMERS, *(f"transformers.models.{name}.modeling_{name}" for name in ("clip", "llava")))
GENERATION = (*TRANSFORMERS, "transformers.generation.utils", "peft", "safetensors.torch")
LIGHTNING = ("lightning.pytorch", "lightning.fabric")
TORCHAO = ("torchao.float8",)
INDUCTOR = ("torch._inductor.compile_fx",)
