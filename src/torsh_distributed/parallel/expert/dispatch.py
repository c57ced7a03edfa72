"""Sends tokens to their experts and back: sorts them into rows, exchanges rows between ranks, adds up weighted results.

Each step has its own backward that only gathers: rows are a permutation of the admitted choices, so nothing is
scattered, and the result does not depend on the order in which threads finish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.comm.collectives.moves import all_to_all_single
from torsh_distributed.comm.shared_memory.buffers import gather_to_all, sum_from_all, takes_rows


@dataclass(frozen=True)
class ExchangeSizes:
    """How many rows this rank sends to each rank of a group, and receives from each."""

    send: list[int]
    receive: list[int]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class RowLayout:
    """Which row holds which choice of which token; dropped choices have no row."""

    choice_of_row: Tensor
    """(rows,): index into the flattened (choices, tokens)."""

    token_of_row: Tensor
    """(rows,)"""

    rows_of_tokens: Tensor
    """The rows of each token, in order of tokens: (tokens, choices), or (rows,) if some are dropped."""

    offsets: Tensor | None
    """(tokens,): where a token's rows start in a flat `rows_of_tokens`; else None."""

    num_choices: int
    num_tokens: int

    @classmethod
    def of(cls, choices: Tensor, *, num_choices: int, num_tokens: int) -> RowLayout:
        """The layout in which row i holds choice number `choices[i]`; other choices have no row."""
        rows = torch.arange(len(choices), device=choices.device)
        token_of_row = choices % max(num_tokens, 1)
        if len(choices) == num_choices * num_tokens:
            row_of_choice = torch.empty_like(choices)
            row_of_choice[choices] = rows
            rows_of_tokens = row_of_choice.view(num_choices, num_tokens).t().contiguous()
            return cls(choices, token_of_row, rows_of_tokens, None, num_choices, num_tokens)
        row_of_choice = choices.new_full((num_choices * num_tokens,), -1)
        row_of_choice[choices] = rows
        rows_of_tokens = row_of_choice.view(num_choices, num_tokens).t().contiguous()
        has_row = rows_of_tokens >= 0
        per_token = has_row.sum(dim=1)
        offsets = per_token.cumsum(dim=0) - per_token
        return cls(choices, token_of_row, rows_of_tokens[has_row], offsets, num_choices, num_tokens)

    def add_up(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """(tokens, dim): the weighted sum of each token's rows. weights: (choices, tokens)."""
        if self.num_tokens == 0 or len(rows) == 0:
            return rows.new_zeros((self.num_tokens, rows.shape[1]))
        by_token = None
        if weights is not None:
            by_token = weights.to(rows.dtype).t().contiguous()
            if self.offsets is not None:
                by_token = weights.to(rows.dtype).flatten()[self.choice_of_row[self.rows_of_tokens]]
        return functional.embedding_bag(
            self.rows_of_tokens, rows, self.offsets, mode="sum", per_sample_weights=by_token
        )


def permute(tokens: Tensor, layout: RowLayout) -> Tensor:
    """(rows, dim): the tokens in row order. tokens: (tokens, dim)."""
    out: Tensor = _Permute.apply(tokens, layout)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def combine(rows: Tensor, weights: Tensor, layout: RowLayout) -> Tensor:
    """(tokens, dim): the weighted sum of each token's rows. rows: (rows, dim), weights: (choices, tokens)."""
    out: Tensor = _Combine.apply(rows, weights, layout)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def dispatch(tokens: Tensor, layout: RowLayout, sizes: ExchangeSizes) -> Tensor:
    """(arriving, dim): the rows that the ranks of `sizes.group` send here, by rank; `layout`: the rows this rank sends.

    Every rank of the group calls this, forward and backward; backward returns gradients to their tokens and sums them.
    """
    out: Tensor = _Dispatch.apply(tokens, layout, sizes)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def collect(rows: Tensor, weights: Tensor, layout: RowLayout, sizes: ExchangeSizes) -> Tensor:
    """(tokens, dim): return rows to the ranks of their tokens; the result is each token's weighted sum.

    rows: (arriving, dim), in the order of `dispatch`; weights: (choices, tokens). Every rank of the group calls this.
    """
    if takes_rows(rows, sizes.group):
        out: Tensor = _Collect.apply(rows, weights, layout, sizes)  # type: ignore[no-untyped-call]  # untyped in torch
        return out
    return combine(exchange(rows, sizes.receive, sizes.send, sizes.group), weights, layout)


def reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """`rows[order]`, where order is a permutation and `inverse` its inverse."""
    out: Tensor = _Reorder.apply(rows, order, inverse)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows that the ranks of `group` send here, by rank; backward returns their gradients.

    `send` and `receive` count rows to and from each rank. Every rank of the group calls this, forward and backward.
    """
    out: Tensor = _ExchangeRows.apply(rows, send, receive, group)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _Permute(Function):
    @staticmethod
    @override
    def forward(ctx: Any, tokens: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.token_of_row)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.add_up(grad.contiguous()), None


class _Combine(Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, weights: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(rows, weights)
        return layout.add_up(rows, weights)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        layout: RowLayout = ctx.layout
        by_row = grad.index_select(0, layout.token_of_row)
        products = (by_row * rows).sum(dim=1, dtype=weights.dtype)
        grad_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
        grad_weights.view(-1)[layout.choice_of_row] = products
        factors = weights.reshape(-1).index_select(0, layout.choice_of_row).to(by_row.dtype)
        return by_row.mul_(factors.unsqueeze(1)), grad_weights, None


class _Dispatch(Function):
    @staticmethod
    @override
    def forward(ctx: Any, tokens: Tensor, layout: RowLayout, sizes: ExchangeSizes) -> Tensor:
        ctx.layout, ctx.sizes = layout, sizes
        send, receive, group = sizes.send, sizes.receive, sizes.group
        if takes_rows(tokens, group):
            return gather_to_all(tokens, layout.token_of_row, send, receive, group=group)
        return all_to_all_single(tokens.index_select(0, layout.token_of_row), send, receive, group=group)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout, sizes = ctx.layout, ctx.sizes
        home = (sizes.receive, sizes.send)
        if takes_rows(grad, sizes.group):
            num_rows = layout.num_tokens
            return (
                sum_from_all(grad, layout.token_of_row, *home, num_rows=num_rows, group=sizes.group),
                None,
                None,
            )
        return layout.add_up(all_to_all_single(grad, *home, group=sizes.group)), None, None


class _Collect(Function):
    """Adds up weighted rows as they arrive, without keeping them: backward computes on the ranks that made them."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, weights: Tensor, layout: RowLayout, sizes: ExchangeSizes) -> Tensor:
        ctx.layout, ctx.sizes = layout, sizes
        by_row = weights.reshape(-1).index_select(0, layout.choice_of_row)
        ctx.save_for_backward(rows, by_row)
        ctx.weights = (weights.shape, weights.dtype)
        return sum_from_all(
            rows,
            layout.token_of_row,
            sizes.receive,
            sizes.send,
            num_rows=layout.num_tokens,
            group=sizes.group,
            weights=by_row.float(),
        )

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, by_row = ctx.saved_tensors
        layout, sizes = ctx.layout, ctx.sizes
        away, home = (sizes.send, sizes.receive), (sizes.receive, sizes.send)
        arrived = gather_to_all(grad, layout.token_of_row, *away, group=sizes.group)
        # Send the weights to the rows; their gradients, one number for each row, come back.
        factors = all_to_all_single(by_row, *away, group=sizes.group)
        products = all_to_all_single(torch.linalg.vecdot(arrived, rows), *home, group=sizes.group)
        shape, dtype = ctx.weights
        grad_weights = torch.zeros(shape, dtype=dtype, device=grad.device)
        grad_weights.view(-1)[layout.choice_of_row] = products.to(dtype)
        return arrived.mul_(factors.to(arrived.dtype).unsqueeze(1)), grad_weights, None, None


class _Reorder(Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _ExchangeRows(Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = (receive, send, group)
        return all_to_all_single(rows, send, receive, group=group)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.sizes
        return all_to_all_single(grad, send, receive, group=group), None, None, None
