"""What all codecs have in common that send some elements with their places."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.compress.codec import Averaged, Codec, Key
from torsh_distributed.compress.sparse import Sparse, decode_sparse, densify, encode_sparse
from torsh_distributed.compress.sparse_average import average_sparse
from torsh_distributed.errors import InvalidArgument


class SparseCodec(Codec):
    """Send some elements with their places. A codec of this kind says which, by `select`."""

    is_unbiased = False
    is_deterministic = True

    def __init__(self, *, dtype: torch.dtype = torch.float16) -> None:
        if dtype not in (torch.float16, torch.float32):
            raise InvalidArgument("values of a sparse message are fp16 or fp32", dtype=dtype)
        self.dtype = dtype

    @abstractmethod
    def select(self, x: Tensor, key: Key) -> Tensor:
        """Indices of the elements to send: int64, strictly increasing."""

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        indices = self.select(x, key)
        return encode_sparse(Sparse(indices, x[indices]), x.numel(), self.dtype)

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        return densify(decode_sparse(payload, num_elements, self.dtype), num_elements)

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        indices = self.select(x, key)
        return average_sparse(
            Sparse(indices, x[indices]),
            x.numel(),
            group,
            dtype=self.dtype,
            is_fixed=self.payload_bytes(x.numel()) is not None,
        )
