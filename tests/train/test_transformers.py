"""Transformers and PEFT models: loaded, trained, exported and asked for text as in one process.

One world for all of it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bed.heavy_imports import GENERATION
from tests.bed.world import World
from torsh_distributed.parallel.weights import reading
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

pytestmark = [pytest.mark.needs_library("transformers"), pytest.mark.needs_library("peft")]

SGD = functools.partial(torch.optim.SGD, lr=0.3)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
PLANS: dict[str, dict[str, Any]] = {"dp": {"dp": 2}, "shard": {"dp": 1, "shard": 2}}
SPLIT: dict[str, dict[str, Any]] = {
    "tp": {"dp": 1, "tp": 2},
    "pp": {"dp": 1, "pp": 2, "pipeline": {"num_microbatches": 2}},
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 3, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **heads, num_local_experts=4, sliding_window=None))


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


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


def count_bytes(run: Callable[[], Engine]) -> tuple[Engine, int]:
    """What `run` returns, and how many bytes of weights it read as rows on this rank."""
    counts: list[int] = []
    read = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        counts.append(read(file, buffers, offset))
        return counts[-1]

    reading.os.preadv = counted
    try:
        return run(), sum(counts)
    finally:
        reading.os.preadv = read


def loads_experts_stored_one_by_one(folder: Path) -> None:
    """As hubs have them and transformers writes them; the model keeps them stacked. A rank reads its own part."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if dist.get_rank() == 0:
        mixtral().save_pretrained(folder)
    dist.barrier()
    reference = AutoModelForCausalLM.from_pretrained(folder)
    total = sum(param.nbytes for param in reference.parameters())
    wanted = alone(reference)
    for name, plan in (PLANS | SPLIT | {"ep": {"dp": 1, "ep": 2}}).items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        make = functools.partial(parallelize, model, SGD, Plan(**plan), weights=folder)
        engine, num_bytes = count_bytes(make)
        assert together(engine) == pytest.approx(wanted, abs=1e-4), name
        if name in ("pp", "shard", "ep"):
            assert num_bytes < 0.8 * total, (name, num_bytes, total)


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
    for plan in (PLANS | SPLIT).values():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        losses = together(parallelize(model, SGD, Plan(**plan), weights=folder))
        assert losses == pytest.approx(wanted, abs=1e-4), plan
        assert torch.equal(model.model.rotary_emb.inv_freq, table)
    for plan in PLANS.values():
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
    for name, plan in SPLIT.items():
        split = parallelize(gpt2(), SGD, Plan(**plan))
        assert text(split.generate, 5 + dist.get_rank()) == text(gpt2().generate), name
        split.export(folder / name)
        assert text(AutoModelForCausalLM.from_pretrained(folder / name).generate) == text(gpt2().generate), name


def trains_adapters(folder: Path) -> None:
    """The frozen model under an adapter; an exported adapter on the base model computes the same."""
    from peft import PeftModel

    reference = lora()
    wanted = alone(reference)
    after = reference(**batches()[0]).loss.item()
    for name, plan in (PLANS | SPLIT).items():
        engine = parallelize(lora(), SGD, Plan(**plan))
        assert together(engine) == pytest.approx(wanted, abs=1e-4), name
        state = engine.state_dict()["model"]
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)
        engine.export(folder / name)
        loaded = PeftModel.from_pretrained(llama(), folder / name)
        assert loaded(**batches()[0]).loss.item() == pytest.approx(after, abs=1e-4)


def all_of_it(folder: Path) -> None:
    loads_as_from_pretrained(folder / "checkpoint")
    loads_experts_stored_one_by_one(folder / "experts")
    exports_and_generates(folder / "export")
    trains_adapters(folder / "adapter")


@pytest.mark.matrix
def test_transformers_models_train_as_in_one_process(world: World, tmp_path: Path) -> None:
    world.run(all_of_it, tmp_path, timeout_s=100, imports=GENERATION)
