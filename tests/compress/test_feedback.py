"""What compression leaves out is kept, follows its parameter, and makes the difference between learning and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.plan import CompressConfig


def compressor(method: str, **settings: Any) -> GradientCompressor:
    """From the first step on, for tensors of any size."""
    return GradientCompressor(
        CompressConfig(**{"method": method, "warmup_steps": 0, "skip_below_numel": 0, **settings})
    )


@pytest.mark.parametrize("method", ["topk:0.1", "sign", "int8", "powersgd:1", "randomk:0.2", "fp16"])
def test_all_that_was_sent_and_the_residual_are_all_gradients(method: str) -> None:
    """Momentum 1 loses nothing, dense steps in between included."""
    sender = compressor(method, error_feedback_momentum=1.0, period=3)
    torch.manual_seed(0)
    total, received = torch.zeros(20, 30), torch.zeros(20, 30)
    for _ in range(7):
        gradient = torch.randn(20, 30)
        total += gradient
        received += sender.decompress(sender.compress("w", gradient))
        sender.step()
    residual = sender.state_dict()["feedback"]["residuals"]["w"].view(20, 30)
    torch.testing.assert_close(received + residual, total, rtol=1e-4, atol=1e-4)
    assert residual.abs().sum() > 0, "the last step was a compressed one"


def test_momentum_scales_what_is_carried_over() -> None:
    sender = compressor("topk:0.5", error_feedback_momentum=0.5)
    sender.compress("w", torch.tensor([4.0, 1.0]))
    sender.step()
    assert sender.decompress(sender.compress("w", torch.tensor([0.1, 1.0]))).tolist() == [0.0, 1.5]


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
@pytest.mark.parametrize("method", ["topk:0.25", "int8"])
def test_what_is_remembered_follows_a_change_of_scale(method: str, feedback: str) -> None:
    """Gradients eight times as large from the fourth step on: messages say eight times as much, and nothing else."""
    torch.manual_seed(0)
    gradients = [torch.randn(8, 8) for _ in range(6)]

    def received(factor: float) -> list[Tensor]:
        ends = [compressor(method, error_feedback=feedback) for _ in range(2)]
        found = []
        for number, gradient in enumerate(gradients):
            if number == 3:
                for end in ends:
                    end.rescale(factor)
            scale = factor if number >= 3 else 1.0
            found.append(ends[1].decompress(ends[0].compress("w", gradient * scale)) / scale)
            ends[0].step()
        return found

    for one, other in zip(received(1.0), received(8.0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def descend(method: str, feedback: str, *, num_steps: int = 200) -> float:
    """|x1 - x2| + |x1 + x2| / 10 from (1.3, 0.7): all gradients have the signs of (1, -1) or (-1, 1)."""
    sender = compressor(method, error_feedback=feedback, error_feedback_momentum=1.0)
    x = torch.tensor([1.3, 0.7], requires_grad=True)

    def loss() -> Tensor:
        return (x[0] - x[1]).abs() + 0.1 * (x[0] + x[1]).abs()

    for number in range(num_steps):
        [gradient] = torch.autograd.grad(loss(), x)
        with torch.no_grad():
            x -= 0.5 / (1 + number) ** 0.5 * sender.decompress(sender.compress("x", gradient))
        sender.step()
    return loss().item()


@pytest.mark.slow
def test_signs_alone_never_get_there_and_with_feedback_they_do() -> None:
    assert descend("sign", "none") > 0.19, "x1 + x2 cannot change"
    assert descend("sign", "ef14") < 0.02


def heterogeneous(feedback: str) -> float:
    """Three ranks pull to three places; the distance from the middle after training with one element of nine sent."""
    torch.manual_seed(3)
    targets = [torch.randn(9) * 5 for _ in range(3)]
    goal = torch.stack(targets).mean(0)
    ranks = [compressor("topk:0.12", error_feedback=feedback, error_feedback_momentum=1.0) for _ in targets]
    x = torch.zeros(9)
    for _ in range(200):
        sent = [rank.decompress(rank.compress("x", x - target)) for rank, target in zip(ranks, targets, strict=True)]
        x = x - 0.1 * torch.stack(sent).mean(0)
        for rank in ranks:
            rank.step()
    return float((x - goal).norm())


@pytest.mark.slow
def test_where_ranks_disagree_ef21_gets_there_and_ef14_stays_around() -> None:
    distance = {feedback: heterogeneous(feedback) for feedback in ("none", "ef14", "ef21")}
    assert distance["ef21"] < 1e-2 < distance["ef14"] / 10 < distance["ef14"] < distance["none"]


def noisy(momentum: float) -> float:
    """A constant under much noise, one element of ten sent: how far the mean of what was sent is from the constant."""
    generator = torch.Generator().manual_seed(5)
    truth = torch.linspace(-1, 1, 200)
    sender = compressor("topk:0.1", error_feedback="ef21", ef21_momentum=momentum)
    off = torch.zeros(200)
    for number in range(200):
        gradient = truth + 3 * torch.randn(200, generator=generator)
        received = sender.decompress(sender.compress("x", gradient))
        sender.step()
        off += received - truth if number >= 100 else 0
    return float(off.norm()) / 100


def test_a_running_mean_of_gradients_tells_more_of_what_lasts() -> None:
    assert noisy(0.9) < noisy(0.5) < noisy(0.0)


@pytest.mark.parametrize("feedback", ["ef14", "ef21"])
@pytest.mark.parametrize("method", ["topk:0.1", "powersgd:2", "natural"])
def test_a_resumed_compressor_goes_on_as_if_never_stopped(method: str, feedback: str) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(16, 16) for _ in range(6)]

    def run(resume_at: int | None) -> list[Tensor]:
        sender = compressor(method, error_feedback=feedback)
        sent = []
        for number, gradient in enumerate(gradients):
            if number == resume_at:
                state = sender.state_dict()
                sender = compressor(method, error_feedback=feedback)
                sender.load_state_dict(state)
            sent.append(sender.compress("w", gradient).data)
            sender.step()
        return sent

    for one, other in zip(run(None), run(3), strict=True):
        assert torch.equal(one, other)
