"""Cross-entropy of a linear head without its logits: some tokens at a time, gradients computed on the way.

For 32,768 tokens and 50,304 classes the logits take 3.3 GB in bf16, as much again for their gradient, and twice that
where a loss works in fp32. Here they exist for 8,192 tokens at a time. The gradients of hidden states and weight
are computed with the loss, so nothing is computed twice; backward multiplies them by the gradient of the loss.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch

CHUNK_NUMEL = {"cuda": 2**29, "cpu": 2**25}
"""Most logits at once, unless the caller says how many tokens. On a GPU fewer would make its products inefficient."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(hidden, weight, bias), targets)` as one fp32 number, without the whole logits.

    `hidden` is (…, width), `weight` (classes, width), `targets` (…) with class numbers; targets of `ignore_index` do
    not count, in the mean either. Inside autocast products are computed in its dtype, else in that of `hidden`. The
    gradient of `weight` is summed in fp32; `weight` may be tied to an embedding. `chunk_tokens` sets how many tokens
    have logits at once. Works in torch.compile; can be differentiated once.
    """
    _check(hidden, weight, targets, reduction)
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    dtype = _compute_dtype(hidden)
    chunk = chunk_tokens or _chunk_tokens(weight.shape[0], hidden.device.type)
    needs = [torch.is_grad_enabled() and one is not None and one.requires_grad for one in (hidden, weight, bias)]
    total, *_ = OPERATOR(flat, weight, bias, wanted, ignore_index, chunk, dtype, *needs)
    loss: Tensor = total if reduction == "sum" else total / (wanted != ignore_index).sum()
    return loss


def workspace_bytes(num_tokens: int, num_classes: int, width: int, *, itemsize: int, device_type: str) -> int:
    """What the loss takes for the moment, beside its gradients and a copy of the head: an estimate for planners.

    Logits of `itemsize` bytes for the tokens of a chunk, in fp32 too where no kernel turns them into their gradients in
    place, and what the products read and give.
    """
    at_once = min(num_tokens, _chunk_tokens(num_classes, device_type))
    of_logit = itemsize if device_type == "cuda" else itemsize + 4
    return at_once * (num_classes * of_logit + width * itemsize)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> None:
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise TensorShapeMismatch(
            "linear_cross_entropy takes hidden (…, width), weight (classes, width) and targets (…)",
            hint="pass class numbers as targets, and the weight of the head as nn.Linear keeps it",
            hidden=tuple(hidden.shape),
            weight=tuple(weight.shape),
            targets=tuple(targets.shape),
        )
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(
            f'reduction must be "mean" or "sum", not {reduction!r}',
            hint="losses of single tokens need the logits: use torch.nn.functional.cross_entropy",
        )


def _chunk_tokens(num_classes: int, device_type: str) -> int:
    """A power of two, as matrix products like it."""
    most = CHUNK_NUMEL.get(device_type, CHUNK_NUMEL["cpu"]) // num_classes
    return max(256, 1 << max(0, most.bit_length() - 1))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


@torch.library.custom_op("torsh::linear_cross_entropy", mutates_args=())
def _losses_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of losses, and its gradients to hidden, weight and bias; empty tensors where they are not needed."""
    needed = (needs_hidden, needs_weight, needs_bias)
    to_hidden, to_weight, to_bias = _gradient_buffers(hidden, weight, bias, needed)
    # Plain matrix products from here on, each in the dtype that was asked for.
    with torch.autocast(hidden.device.type, enabled=False):
        head = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = hidden[start : start + chunk].to(dtype)
            logits = part @ head.t() if bias is None else torch.addmm(bias.to(dtype), part, head.t())
            total += _row_losses(logits, targets[start : start + chunk], ignore_index, any(needed)).sum()
            if needs_hidden:  # the logits have become their gradients
                to_hidden[start : start + chunk] = logits @ head
            if needs_weight:
                _add_product(to_weight, logits.t(), part)
            if needs_bias:
                to_bias += logits.sum(dim=0, dtype=torch.float32)
            del logits  # before the next are made
    return total, to_hidden, to_weight, to_bias


def _gradient_buffers(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    needs_hidden, needs_weight, needs_bias = needed
    none = hidden.new_empty(0)
    return (
        torch.empty_like(hidden) if needs_hidden else none,
        torch.zeros_like(weight, dtype=torch.float32) if needs_weight else none.clone(),
        torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else none.clone(),
    )


@_losses_and_gradients.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignore_index: int,
    chunk: int,
    dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    buffers = _gradient_buffers(hidden, weight, bias, (needs_hidden, needs_weight, needs_bias))
    return (hidden.new_empty((), dtype=torch.float32), *buffers)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    # Nobody uses the gradients outside: torch would make zeros for theirs, as large as the head.
    ctx.set_materialize_grads(False)
    ctx.dtypes = [None if one is None else one.dtype for one in inputs[:3]]
    ctx.needed = inputs[-3:]


def _scaled_gradients(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """In place outside a graph: these buffers are as large as the head, and nobody else has them."""
    found: list[Tensor | None] = []
    for gradient, dtype, is_needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needed, strict=True):
        if not is_needed:
            found.append(None)
        elif torch.compiler.is_compiling():
            found.append((gradient * scale).to(dtype))
        else:
            found.append(gradient.mul_(scale).to(dtype))
    return (*found, *([None] * 7))


_losses_and_gradients.register_autograd(_scaled_gradients, setup_context=_keep)
OPERATOR = torch.ops.torsh.linear_cross_entropy


@register_flop_formula(OPERATOR)
def _num_flops(hidden: Sequence[int], weight: Sequence[int], *_: object, out_shape: Any = None, **__: object) -> int:
    return 2 * hidden[0] * hidden[1] * weight[0]


def _row_losses(logits: Tensor, targets: Tensor, ignore_index: int, with_gradients: bool) -> Tensor:
    """The loss of each row; with gradients, the logits become the gradient of their sum, in place."""
    if logits.is_cuda and _has_triton():
        from torsh_distributed.train.speed.cross_entropy_kernel import losses_of_rows

        return losses_of_rows(logits, targets, ignore_index=ignore_index, with_gradients=with_gradients)
    is_ignored = targets == ignore_index
    chosen = targets.masked_fill(is_ignored, 0).unsqueeze(1)
    values = logits.float()
    log_totals = values.logsumexp(dim=1, keepdim=True)
    losses = (log_totals - values.gather(1, chosen)).squeeze(1).masked_fill_(is_ignored, 0)
    if with_gradients:
        gradients = values.sub_(log_totals).exp_() if values is not logits else (values - log_totals).exp_()
        gradients.scatter_add_(1, chosen, gradients.new_full((1, 1), -1.0).expand_as(chosen))
        logits.copy_(gradients.masked_fill_(is_ignored.unsqueeze(1), 0))
    return losses


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in fp32: by the product itself where it can."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
