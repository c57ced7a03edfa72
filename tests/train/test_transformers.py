"""Transformers and PEFT models: loaded, trained, exported and asked for text as in one process.

One world for all of it: importing transformers takes longer than the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.world import World
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

pytestmark = [pytest.mark.needs_library("transformers"), pytest.mark.needs_library("peft")]

SGD = functools.partial(torch.optim.SGD, lr=0.3)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
PLANS: dict[str, dict[str, Any]] = {"dp": {"dp": 2}, "shard": {"dp": 1, "shard": 2}}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def batches() -> list[dict[str, Tensor]]:
    torch.manual_seed(7)
    return [{"input_ids": part, "labels": part} for part in torch.randint(64, (3, 4, 12))]


def alone(model: Any) -> list[float]:
    optimizer = SGD(model.parameters())
    losses = []
    for batch in batches():
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def together(engine: Engine) -> list[float]:
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    return [engine.step({name: value[rank::degree] for name, value in batch.items()}) for batch in batches()]


def text(generate: Callable[..., Tensor], first: int = 5) -> list[int]:
    found: list[int] = generate(torch.full((1, 4), first), max_new_tokens=6, do_sample=False)[0].tolist()
    return found


def loads_as_from_pretrained(folder: Path) -> None:
    """From a checkpoint in several files, with tied weights and rotary tables."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if dist.get_rank() == 0:
        llama().save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").exists()
    dist.barrier()
    reference = AutoModelForCausalLM.from_pretrained(folder)
    table = reference.model.rotary_emb.inv_freq.clone()
    wanted = alone(reference)
    for plan in PLANS.values():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        losses = together(parallelize(model, SGD, Plan(**plan), weights=folder))
        assert losses == pytest.approx(wanted, abs=1e-4)
        assert torch.equal(model.model.rotary_emb.inv_freq, table)
        with torch.device("meta"):
            fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        begun = together(parallelize(fresh, SGD, Plan(**plan)))
        assert begun[0] == pytest.approx(torch.log(torch.tensor(64.0)).item(), abs=0.3), "begins as _init_weights says"
        assert torch.equal(fresh.model.rotary_emb.inv_freq, table)


def exports_and_generates(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    before = text(llama().generate)
    for name, plan in PLANS.items():
        engine = parallelize(llama(), SGD, Plan(**plan))
        assert text(engine.generate, 5 + dist.get_rank()) == before, "rank 0's prompt"
        engine.generate(torch.full((1, 4), 5), max_new_tokens=3, do_sample=True)
        together(engine)
        engine.export(folder / name)
        loaded = AutoModelForCausalLM.from_pretrained(folder / name)
        assert type(loaded).__name__ == "LlamaForCausalLM"
        assert loaded.generation_config.bos_token_id == 3
        assert text(loaded.generate) == text(engine.generate)
        state = engine.state_dict()["model"]
        assert all(torch.equal(value, state[key]) for key, value in loaded.state_dict().items())
    split = parallelize(gpt2(), SGD, Plan(dp=1, tp=2))
    assert text(split.generate, 5 + dist.get_rank()) == text(gpt2().generate)
    split.export(folder / "tp")
    assert text(AutoModelForCausalLM.from_pretrained(folder / "tp").generate) == text(gpt2().generate)


def trains_adapters(folder: Path) -> None:
    """The frozen model under an adapter; an exported adapter on the base model computes the same."""
    from peft import PeftModel

    reference = lora()
    wanted = alone(reference)
    after = reference(**batches()[0]).loss.item()
    for name, plan in PLANS.items():
        engine = parallelize(lora(), SGD, Plan(**plan))
        assert together(engine) == pytest.approx(wanted, abs=1e-4)
        state = engine.state_dict()["model"]
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)
        engine.export(folder / name)
        loaded = PeftModel.from_pretrained(llama(), folder / name)
        assert loaded(**batches()[0]).loss.item() == pytest.approx(after, abs=1e-4)


def all_of_it(folder: Path) -> None:
    loads_as_from_pretrained(folder / "checkpoint")
    exports_and_generates(folder / "export")
    trains_adapters(folder / "adapter")


def test_transformers_models_train_as_in_one_process(world: World, tmp_path: Path) -> None:
    world.run(all_of_it, tmp_path, timeout_s=100)
