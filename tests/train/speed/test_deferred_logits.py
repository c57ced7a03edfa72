"""Logits that wait: cross-entropy takes them unseen, any other use gets them as they would have been."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torsh_distributed.train.speed.deferred_logits import DeferredLogits

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
