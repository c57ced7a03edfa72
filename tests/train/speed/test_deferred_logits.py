"""Logits that wait: cross-entropy takes them unseen, any other use gets them as they would have been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.golden import MODELS, golden
from tests.parallel.sharded.test_module import Curve, train_all
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.speed.deferred_logits import DeferredLogits, defer_logits, find_head, should_defer

HIDDEN = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(11, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(2))
WHOLE = functional.linear(HIDDEN, WEIGHT)


def deferred() -> DeferredLogits:
    return DeferredLogits(HIDDEN, WEIGHT, None, compute_dtype=torch.float32, dtype=torch.float32)


def transformers_style(logits: Tensor) -> Tensor:
    """Upcast, shift, flatten: what the losses of transformers do."""
    return functional.cross_entropy(logits.float().view(-1, 11), TARGETS.view(-1), reduction="sum") / 7


def shifted(logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits[..., :-1, :].contiguous().flatten(0, 1), TARGETS[:, 1:].flatten())


def as_module(logits: Tensor) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss(ignore_index=4)(logits.reshape(-1, logits.size(-1)), TARGETS.flatten())
    return loss


@pytest.mark.parametrize("loss_fn", [transformers_style, shifted, as_module])
def test_usual_losses_are_computed_without_the_logits(loss_fn: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: DeferredLogits) -> Tensor:
        raise AssertionError("the logits were computed")

    monkeypatch.setattr(DeferredLogits, "whole", never)
    torch.testing.assert_close(loss_fn(deferred()), loss_fn(WHOLE))  # type: ignore[operator]


@pytest.mark.parametrize(
    "use",
    [
        lambda logits: logits * 2 + 1,
        lambda logits: logits[:, -1, :],
        lambda logits: logits[0],
        lambda logits: logits[..., :4],
        lambda logits: logits[:, 1:3],
        lambda logits: logits.argmax(-1),
        lambda logits: torch.tanh(logits / 30) * 30,
        lambda logits: logits.transpose(1, 2),
        lambda logits: logits.view(3, 55),
        lambda logits: torch.cat([logits, logits]),
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
        lambda logits: functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="none"),
        lambda logits: functional.cross_entropy(logits.transpose(1, 2), TARGETS),
    ],
)
def test_any_other_use_gets_them_whole(use: object) -> None:
    torch.testing.assert_close(torch.as_tensor(use(deferred()) + 0), use(WHOLE))  # type: ignore[operator]


def test_facts_are_known_without_values() -> None:
    logits = deferred()
    assert logits.shape == WHOLE.shape
    assert (logits.dim(), logits.size(-1), len(logits), logits.dtype, logits.device) == (
        3,
        11,
        3,
        torch.float32,
        torch.device("cpu"),
    )
    assert logits.float().dtype is torch.float32
    assert repr(logits) == "DeferredLogits(shape=(3, 5, 11), dtype=torch.float32)"
    assert logits._whole is None


def test_gradients_flow_through_either_way() -> None:
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    expected = torch.autograd.grad(shifted(functional.linear(hidden, weight)), (hidden, weight))
    logits = DeferredLogits(hidden, weight, None, compute_dtype=torch.float32, dtype=torch.float32)
    torch.testing.assert_close(torch.autograd.grad(shifted(logits), (hidden, weight)), expected)
    whole = DeferredLogits(hidden, weight, None, compute_dtype=torch.float32, dtype=torch.float32)
    torch.testing.assert_close(torch.autograd.grad(shifted(whole * 1.0), (hidden, weight)), expected)


FUSED = {"training": {"fused_loss": True}}


def test_a_head_is_found_by_what_it_maps_to() -> None:
    found = find_head(MODELS["gpt"][0]())
    assert found is not None
    assert found[0] == "head"
    two = nn.ModuleDict({"table": nn.Embedding(9, 4), "one": nn.Linear(4, 9), "two": nn.Linear(4, 9)})
    assert find_head(two) is None
    two.get_output_embeddings = lambda: two["two"]  # type: ignore[assignment]
    assert find_head(two) == ("two", two["two"])


def test_a_model_without_a_head_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigurationError, match="no linear head") as caught:
        defer_logits(nn.Sequential(nn.Linear(4, 4)))
    assert "linear_cross_entropy(hidden, head.weight, targets)" in str(caught.value.hint)


def test_training_gives_the_losses_of_whole_logits(world: World) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt", FUSED),
        ("gpt", {**FUSED, "mesh": {"dp": 1, "shard": 2}}),
        ("gpt", {"training": {"fused_loss": True, "gradient_accumulation": 2}, "mesh": {"dp": 1, "shard": 2}}),
    ]
    for curves in world.run(train_all, cases, num_ranks=2):
        assert_golden(curves, cases)


def assert_golden(curves: list[Curve], cases: list[tuple[str, dict[str, Any]]]) -> None:
    for (name, _), curve in zip(cases, curves, strict=True):
        for mine, expected in zip(curve, golden(name), strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)


def llama_losses(is_fused: bool, padded: bool) -> tuple[list[float], bool]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    plan = Plan.from_dict({"training": {"fused_loss": is_fused, "gradient_clipping": 1.0}})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    ids = torch.randint(61, (4, 12))
    labels = ids.masked_fill(torch.arange(12) >= 9, -100) if padded else ids
    batch = {"input_ids": ids, "labels": labels}
    losses = [engine.step(batch) for _ in range(4)]
    return losses, isinstance(model(**batch).logits, DeferredLogits)


def all_llama_losses() -> list[tuple[list[float], bool]]:
    return [llama_losses(is_fused, padded) for padded in (False, True) for is_fused in (False, True)]


@pytest.mark.needs_library("transformers")
def test_a_model_of_transformers_with_labels_gets_the_same_losses(world: World) -> None:
    plain, fused, plain_padded, fused_padded = world.run(all_llama_losses, num_ranks=1, imports=TRANSFORMERS)[0]
    assert fused[0] == pytest.approx(plain[0], abs=1e-5)
    assert fused_padded[0] == pytest.approx(plain_padded[0], abs=1e-5)
    assert (plain[1], fused[1]) == (False, True)


class Classes(nn.Module):
    """An embedding and a head of as many classes."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(num_classes, width)
        self.head = nn.Linear(width, num_classes, bias=False)

    @override
    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.table(ids))
        return logits


GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_auto_defers_large_heads_on_a_gpu_where_the_plan_allows_it() -> None:
    with torch.device("meta"):
        large, small = Classes(16_384), Classes(1000)
    assert should_defer(large, Plan(), GPU)
    sharded = {"mesh": {"shard": 2}, "fsdp": {"wrap": "none"}, "compile": {"enabled": True}}
    assert should_defer(large, Plan.from_dict(sharded), GPU)
    assert not should_defer(large, Plan(), CPU)
    assert not should_defer(small, Plan(), GPU)
    assert not should_defer(large, Plan.from_dict({"training": {"fused_loss": False}}), GPU)
    assert should_defer(small, Plan.from_dict(FUSED), CPU)
    for against in (
        {"mesh": {"tp": 2}},
        {"mesh": {"pp": 2}},
        {"compile": {"enabled": True, "scope": "model"}},
        {"ddp": {"static_graph": True}},
        {"offload": {"enabled": True}},
        {"mesh": {"shard": 2}},  # where no layer repeats, the head is a piece by itself
    ):
        assert not should_defer(large, Plan.from_dict(against), GPU), against


def test_auto_stops_once_the_logits_were_asked_for() -> None:
    model = Classes(11)
    defer_logits(model, stops_if_asked=True)
    ids = torch.arange(5)
    with torch.no_grad():
        assert type(model(ids)) is Tensor
    logits = model(ids)
    assert isinstance(logits, DeferredLogits)
    functional.cross_entropy(logits, ids)
    again = model(ids)
    assert isinstance(again, DeferredLogits)
    assert int(again.argmax(-1)[0]) == int((model.table(ids) @ model.head.weight.t()).argmax(-1)[0])
    assert type(model(ids)) is Tensor


def test_what_was_asked_for_is_used_from_then_on() -> None:
    """As with plain logits: a hook on them sees the gradient."""
    model = Classes(11)
    defer_logits(model)
    logits, seen = model(torch.arange(5)), []
    logits.register_hook(seen.append)
    functional.cross_entropy(logits, torch.arange(5)).backward()
    assert len(seen) == 1


def test_logits_from_before_an_update_are_refused() -> None:
    model = Classes(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(defer_logits(model).note_update)
    kept, read = model(torch.arange(5)), model(torch.arange(5))
    values = read.detach()
    functional.cross_entropy(kept, torch.arange(5)).backward()
    optimizer.step()
    for late in (lambda: kept[:2] + 0, lambda: functional.cross_entropy(kept, torch.arange(5))):
        with pytest.raises(InvalidArgument, match="before the weights were updated"):
            late()
    assert torch.equal(read.detach(), values)


def on_gpu(fused_loss: bool | str) -> tuple[list[float], int]:
    """Losses, and the most memory that a step took beyond what lay there before."""
    model = Classes(65_536, width=64).cuda()
    plan = Plan.from_dict({"training": {"fused_loss": fused_loss}, "precision": {"dtype": "bf16"}})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn=functional.cross_entropy)
    ids = torch.arange(16_384).cuda()
    losses = [engine.step((ids, ids.flip(0))) for _ in range(2)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    losses.append(engine.step((ids, ids.flip(0))))
    return losses, torch.cuda.max_memory_allocated() - before


def both_on_gpu() -> list[tuple[list[float], int]]:
    return [on_gpu(False), on_gpu("auto")]


@pytest.mark.ranks
@pytest.mark.needs_cuda
def test_by_default_a_large_head_never_has_whole_logits(world: World) -> None:
    [(plain, most), (auto, fewer)] = world.run(both_on_gpu, num_ranks=1, backend="nccl")[0]
    assert auto == pytest.approx(plain, rel=1e-3)
    assert fewer < most - 2 * 16_384 * 65_536, "the logits alone take twice as much in bf16"
