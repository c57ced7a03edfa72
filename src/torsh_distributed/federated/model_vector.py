"""A model's values as one vector: what travels between server and clients, and what is averaged."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument


class ModelVector:
    """Reads and writes the parameters and floating-point buffers of one model, in the order of its names.

    Integer buffers (such as the number of batches that a norm has seen) stay what they are on each side.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._tensors = [tensor for tensor in named.values() if tensor.is_floating_point()]
        if not self._tensors:
            raise InvalidArgument("the model has no parameters to train", model=type(model).__name__)
        self.dtype = torch.float64 if any(one.dtype == torch.float64 for one in self._tensors) else torch.float32
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.numel = sum(self._sizes)
        names = [(name, *one.shape) for name, one in named.items() if one.is_floating_point()]
        self.fingerprint = hashlib.sha256(repr((names, str(self.dtype))).encode()).hexdigest()[:16]
        """Of names, shapes and dtype: equal on both sides, or their vectors mean different things."""
        self._places = {id(one): index for index, one in enumerate(self._tensors)}

    @torch.no_grad()
    def read(self) -> Tensor:
        """A copy of the model's values, on the CPU."""
        return torch.cat([tensor.detach().flatten().to("cpu", self.dtype) for tensor in self._tensors])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the model's values."""
        for tensor, values in zip(self._tensors, torch.split(vector, self._sizes), strict=True):
            tensor.copy_(values.view(tensor.shape))

    def views(self, vector: Tensor) -> dict[int, Tensor]:
        """The part of a vector that belongs to each tensor of the model, by the tensor's `id`, on its device."""
        parts = torch.split(vector, self._sizes)
        return {
            key: parts[index].view(self._tensors[index].shape).to(self._tensors[index])
            for key, index in self._places.items()
        }
