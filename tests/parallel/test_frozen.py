"""Adapters, frozen parameters and mixed dtypes train as in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bed.world import World
from tests.parallel.weights.checkpoints import gpt
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

SGD = functools.partial(torch.optim.SGD, lr=0.3)
Loss = Callable[[Any, Any], Tensor] | None
PLANS: dict[str, dict[str, Any]] = {"dp": {"dp": 2}, "shard": {"dp": 1, "shard": 2}, "tp": {"dp": 1, "tp": 2}}


def frozen() -> nn.Module:
    """A GPT of which only the norms, biases and the head learn."""
    model = gpt()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or name.endswith("bias") or name.startswith("head"))
    return model


def mixed() -> nn.Module:
    """Frozen layers in bf16 around trained ones in fp32, as adapters have them."""
    torch.manual_seed(4)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16).to(torch.bfloat16).requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x.bfloat16()).float() + self.adapter(x)
            return out.square().mean()

    return Mixed()


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    made: nn.Module = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    return made


def batches(kind: str) -> list[Any]:
    torch.manual_seed(9)
    if kind == "mixed":
        return list(torch.randn(4, 4, 16))
    ids = torch.randint(29, (4, 4, 13))
    if kind == "lora":
        return [{"input_ids": part, "labels": part} for part in ids]
    return [(part[:, :-1], part[:, 1:]) for part in ids]


KINDS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "frozen": (frozen, next_character_loss),
    "mixed": (mixed, None),
    "lora": (lora, None),
}


def part_of(batch: Any, rank: int, degree: int) -> Any:
    if isinstance(batch, dict):
        return {name: value[rank::degree] for name, value in batch.items()}
    return tuple(one[rank::degree] for one in batch) if isinstance(batch, tuple) else batch[rank::degree]


def trained(kind: str, names: list[str], folder: Path) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    make, loss_fn = KINDS[kind]
    found = {}
    for name in names:
        engine = parallelize(make(), SGD, Plan(**PLANS[name]), loss_fn=loss_fn)
        rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
        losses = [engine.step(part_of(batch, rank, degree)) for batch in batches(kind)]
        found[name] = (losses, engine.state_dict()["model"])
        if kind == "lora":
            engine.export(folder / name)
    return found


def alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    make, loss_fn = KINDS[kind]
    model = make()
    optimizer = SGD(model.parameters())
    losses = []
    for batch in batches(kind):
        if loss_fn is not None:
            loss = loss_fn(model(batch[0]), batch[1])
        else:
            out = model(**batch) if isinstance(batch, dict) else model(batch)
            loss = getattr(out, "loss", out)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("frozen", ["dp", "shard", "tp"]),
        ("mixed", ["dp", "shard"]),
        pytest.param(
            "lora",
            ["dp", "shard"],
            marks=[pytest.mark.needs_library("peft"), pytest.mark.needs_library("transformers")],
        ),
    ],
)
def test_what_is_frozen_stays_and_the_rest_learns_as_alone(
    world: World, tmp_path: Path, kind: str, names: list[str]
) -> None:
    wanted, state = alone(kind)
    for found in world.run(trained, kind, names, tmp_path):
        for name, (losses, learned) in found.items():
            assert losses == pytest.approx(wanted, abs=1e-4), name
            for key, value in state.items():
                torch.testing.assert_close(learned[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    if kind == "lora":
        _check_adapters([tmp_path / name for name in names], batches(kind)[0])


def _check_adapters(folders: list[Path], batch: dict[str, Tensor]) -> None:
    """An exported adapter, on the base model as it was, computes what the trained model computes."""
    from peft import PeftModel

    model = lora()
    optimizer = SGD(model.parameters())
    for one in batches("lora"):
        optimizer.zero_grad()
        model(**one).loss.backward()
        optimizer.step()
    wanted = model(**batch).loss.item()
    for folder in folders:
        loaded = PeftModel.from_pretrained(lora().unload(), folder)
        assert loaded(**batch).loss.item() == pytest.approx(wanted, abs=1e-5)
