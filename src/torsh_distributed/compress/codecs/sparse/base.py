"""SparseCodec: what codecs that send some elements with their indices have in common."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Averaged, Codec, Key
from torsh_distributed.compress.exchange.message_agreement import AgreementCache, signature_of
from torsh_distributed.compress.exchange.sparse_exchange import SparseFormat, average_sparse
from torsh_distributed.compress.messages.sparse import Sparse, decode_sparse, densify, encode_sparse
from torsh_distributed.errors import InvalidArgument


class SparseCodec(Codec):
    """Send some elements with their indices; subclasses choose which in `select`.

    `parameter` is the number of the method: it must be the same on all ranks.
    """

    is_deterministic = True

    def __init__(self, parameter: float, *, dtype: torch.dtype = torch.float16) -> None:
        if dtype not in (torch.float16, torch.float32):
            raise InvalidArgument("values of a sparse message must be fp16 or fp32", dtype=dtype)
        self.dtype = dtype
        self._signature = signature_of(self.name, float(parameter), str(dtype))
        self._agreements = AgreementCache()

    @abstractmethod
    def select(self, x: Tensor, key: Key) -> Tensor:
        """Indices of the elements to send: int64, strictly increasing."""

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        indices = self.select(x, key)
        return encode_sparse(Sparse(indices, x.index_select(0, indices)), x.numel(), self.dtype)

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        return densify(decode_sparse(payload, num_elements, self.dtype), num_elements)

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        self._agreements.require(self.name, self._signature, x.numel(), group=group, device=x.device)
        return self.average_selected(x, self.select(x, key), group)

    def average_selected(self, x: Tensor, indices: Tensor, group: dist.ProcessGroup) -> Averaged:
        """The mean over the ranks of what they selected."""
        form = SparseFormat(self._signature, self.dtype)
        is_fixed = self.payload_bytes(x.numel()) is not None
        return average_sparse(Sparse(indices, x.index_select(0, indices)), x.numel(), group, form, is_fixed=is_fixed)

    @override
    def reset(self) -> None:
        self._agreements.forget()
