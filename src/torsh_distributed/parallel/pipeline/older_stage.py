"""Integers and booleans between stages in torch before 2.13, which gives all that a stage receives a gradient.

Drop with support for torch < 2.13: there only what requires a gradient has one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override


class OlderStage(PipelineStage):
    """A stage of older torch that sends masks and indices forward and nothing back for them."""

    @override
    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        trains, self.has_backward = self.has_backward, False
        try:
            out = super()._prepare_forward_infra(*args, **kwargs)
        finally:
            self.has_backward = trains
        for info in self._received():
            buffer = _buffer(info)
            buffer.requires_grad_(trains and buffer.is_floating_point())
        return out

    def _received(self) -> list[Any]:
        return [] if self.is_first else [info for infos in self.args_recv_info.values() for info in infos]

    @override
    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[Any, ...]:
        found = super()._create_grad_recv_info(act_send_info)
        return tuple(info if _buffer(info).is_floating_point() else None for info in found)

    @override
    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return tuple(info and info.buffer for info in self.grad_recv_info[bwd_chunk_id])

    @override
    def _create_grad_send_info(self, args_recv_info: Any) -> list[int | None]:
        return [info.source if info.buffer.requires_grad else None for info in args_recv_info]

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        out = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first and bwd_chunk_id in self.bwd_cache:
            # A stage that does not use what it received owes the one before a gradient all the same.
            pairs = zip(self.bwd_cache[bwd_chunk_id], self.args_recv_info[bwd_chunk_id], strict=True)
            self.bwd_cache[bwd_chunk_id] = tuple(
                torch.zeros_like(_buffer(info)) if grad is None and _buffer(info).requires_grad else grad
                for grad, info in pairs
            )
        return out

    @override
    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        outputs = prev_stage_outputs if isinstance(prev_stage_outputs, tuple) else (prev_stage_outputs,)
        for info, value in zip(self.args_recv_info[mb_index], outputs, strict=True):
            info.buffer = value.detach().requires_grad_(value.is_floating_point())

    @override
    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        for info, value in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if info is not None:
                info.buffer = value


def _buffer(info: Any) -> Tensor:
    """Where a stage of older torch receives a value; newer torch makes it later, and its type says so."""
    assert info.buffer is not None, "older torch makes it with the description of what is received"
    return cast(Tensor, info.buffer)
