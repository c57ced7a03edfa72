"""The fused loss against torch's cross_entropy of whole logits: values, gradients, memory, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.train.batch_size import LiveBytes
from torsh_distributed.train.speed import linear_cross_entropy as module
from torsh_distributed.train.speed.linear_cross_entropy import linear_cross_entropy

TOKENS, WIDTH, CLASSES = 50, 16, 37
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]


def inputs(device: str = "cpu", *, ignored: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(TOKENS, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)
    targets = torch.randint(CLASSES, (TOKENS,))
    targets[torch.randperm(TOKENS)[:ignored]] = -100
    made = [one.to(device).requires_grad_() for one in (hidden, weight, bias)]
    return made[0], made[1], made[2], targets.to(device)


def gradients(loss: Tensor, *params: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss * 3.0, params))  # a loss scale, say


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [None, 8, 50, 7])
def test_loss_and_gradients_are_those_of_whole_logits(device: str, reduction: str, chunk: int | None) -> None:
    hidden, weight, bias, targets = inputs(device)
    for with_bias in (False, True):
        own_bias = bias if with_bias else None
        params = [hidden, weight, bias][: 3 if with_bias else 2]
        expected = functional.cross_entropy(functional.linear(hidden, weight, own_bias), targets, reduction=reduction)
        loss = linear_cross_entropy(hidden, weight, targets, bias=own_bias, reduction=reduction, chunk_tokens=chunk)
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss, expected)
        for mine, theirs in zip(gradients(loss, *params), gradients(expected, *params), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # this torch on a CPU without bf16
@pytest.mark.parametrize("device", DEVICES)
def test_in_autocast_it_is_as_exact_as_torch(device: str) -> None:
    """Against fp64: the error of the fused loss is at most that of torch's in bf16, and a rounding."""
    hidden, weight, _, targets = inputs(device)
    exact = functional.cross_entropy(functional.linear(hidden.double(), weight.double()), targets)
    with torch.autocast(device, dtype=torch.bfloat16):
        torchs = functional.cross_entropy(functional.linear(hidden, weight), targets)
        ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    assert ours.dtype is torchs.dtype is torch.float32
    assert abs(ours - exact) <= abs(torchs - exact) + 4e-3 * abs(exact)
    wanted = gradients(exact, hidden, weight)
    for mine, theirs, right in zip(
        gradients(ours, hidden, weight), gradients(torchs, hidden, weight), wanted, strict=True
    ):
        assert mine.dtype is theirs.dtype
        assert (mine - right).norm() <= 1.2 * (theirs - right).norm() + 1e-3 * right.norm()


def test_shapes_of_batches_tied_and_frozen_heads() -> None:
    torch.manual_seed(1)
    table = torch.randn(CLASSES, WIDTH, requires_grad=True)
    ids, targets = torch.randint(CLASSES, (4, 6)), torch.randint(CLASSES, (4, 6))
    expected = functional.cross_entropy(functional.linear(table[ids], table).flatten(0, 1), targets.flatten())
    loss = linear_cross_entropy(table[ids], table, targets, chunk_tokens=5)
    torch.testing.assert_close(gradients(loss, table), gradients(expected, table))
    hidden = torch.randn(4, 6, WIDTH, requires_grad=True)
    frozen = linear_cross_entropy(hidden, table.detach(), targets)
    (gradient,) = gradients(frozen, hidden)
    assert gradient.shape == hidden.shape


def test_targets_that_are_all_ignored_give_nan_as_in_torch() -> None:
    hidden, weight, _, targets = inputs()
    nothing = torch.full_like(targets, -100)
    assert linear_cross_entropy(hidden, weight, nothing).isnan()
    assert linear_cross_entropy(hidden, weight, nothing, reduction="sum") == 0
    other = linear_cross_entropy(hidden, weight, targets.clamp(min=0), ignore_index=3)
    torch.testing.assert_close(
        other, functional.cross_entropy(hidden @ weight.t(), targets.clamp(min=0), ignore_index=3)
    )


def test_whole_logits_never_exist() -> None:
    hidden, weight, targets = torch.randn(512, 8), torch.randn(4096, 8), torch.randint(4096, (512,))
    whole_bytes = 512 * 4096 * 4
    with LiveBytes() as live:
        module._losses_and_gradients._init_fn(hidden, weight, None, targets, -100, 32, torch.float32, True, True, False)
    assert live.peak < whole_bytes / 4


def test_gradients_can_be_taken_once() -> None:
    hidden, weight, _, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets)
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)


def test_no_gradient_is_computed_where_none_is_needed() -> None:
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, functional.cross_entropy(hidden @ weight.t(), targets).detach())


@pytest.mark.needs_cuda
def test_a_target_that_is_no_class_is_noticed_on_a_gpu() -> None:
    hidden, weight, _, targets = inputs("cuda")
    targets[3] = CLASSES
    assert linear_cross_entropy(hidden, weight, targets).isnan()


def test_wrong_shapes_and_reductions_are_refused() -> None:
    hidden, weight, _, targets = inputs()
    with pytest.raises(TensorShapeMismatch, match="takes hidden"):
        linear_cross_entropy(hidden, weight, targets[:-1])
    with pytest.raises(TensorShapeMismatch, match="takes hidden"):
        linear_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(InvalidArgument, match="none"):
        linear_cross_entropy(hidden, weight, targets, reduction="none")
