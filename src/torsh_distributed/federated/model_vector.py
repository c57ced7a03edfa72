"""A model's values as one vector: what travels between server and clients, and what is averaged."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument


class ModelVector:
    """Reads and writes a model's floating-point values: trained parameters, then frozen ones, then buffers.

    Strategies, noise and lossy codecs are for what is trained; of running statistics only a mean is one again. Integer
    buffers (such as the number of batches that a norm has seen) do not travel: each training begins with those that
    `model()` made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        named: dict[str, Tensor] = {name: param for name, param in params.items() if param.requires_grad}
        named.update(params)  # frozen ones behind those that are there
        named.update(buffers)
        if odd := [name for name, one in named.items() if one.is_complex()]:
            raise InvalidArgument(
                "complex values of a model cannot be averaged here",
                hint="keep them as two real ones (torch.view_as_real)",
                names=odd,
            )
        values = {name: one for name, one in named.items() if one.is_floating_point()}
        self._tensors = list(values.values())
        if not self._tensors:
            raise InvalidArgument("the model has no parameters to train", model=type(model).__name__)
        self.dtype = torch.float64 if any(one.dtype == torch.float64 for one in self._tensors) else torch.float32
        self._sizes = [tensor.numel() for tensor in self._tensors]
        self.numel = sum(self._sizes)
        self.num_trained = sum(one.numel() for one in params.values() if one.requires_grad)
        """The first so many values are of parameters that are trained."""
        self.num_parameters = sum(one.numel() for one in params.values() if one.is_floating_point())
        """The first so many are of parameters, frozen ones too."""
        self._integers = [one for one in named.values() if not one.is_floating_point()]
        self._first_integers = [one.clone() for one in self._integers]
        self.fingerprint = self._digest(values, {name: one for name, one in named.items() if name not in values})
        """Of names, shapes, dtype and integer buffers: equal on both sides, or their vectors mean different things."""
        self._places = {id(one): index for index, one in enumerate(self._tensors)}
        self._is_plain = all(one.dtype == self.dtype and one.device.type == "cpu" for one in self._tensors)
        self._written: Tensor | None = None
        self._written_parts: list[Tensor] = []

    def _digest(self, values: dict[str, Tensor], integers: dict[str, Tensor]) -> str:
        layout = [(name, *one.shape) for name, one in values.items()]
        digest = hashlib.sha256(repr((layout, self.num_trained, str(self.dtype))).encode())
        for name, one in integers.items():
            digest.update(repr((name, *one.shape, str(one.dtype))).encode())
            digest.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def read(self) -> Tensor:
        """A copy of the model's values, on the CPU."""
        if self._is_plain:
            return torch.cat([tensor.detach().reshape(-1) for tensor in self._tensors])
        return torch.cat([tensor.detach().flatten().to("cpu", self.dtype) for tensor in self._tensors])

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set the model's values, and its integer buffers to what they were at first."""
        if vector is not self._written:  # all clients of a round begin with the same one
            parts = zip(self._tensors, torch.split(vector, self._sizes), strict=True)
            self._written, self._written_parts = vector, [values.view(tensor.shape) for tensor, values in parts]
        for tensor, values in zip(self._tensors, self._written_parts, strict=True):
            tensor.copy_(values)
        for tensor, first in zip(self._integers, self._first_integers, strict=True):
            tensor.copy_(first)

    def take_integers(self, other: ModelVector) -> None:
        """Begin with another one's integer buffers from now on, of the same model."""
        self._first_integers = other._first_integers

    def views(self, vector: Tensor) -> dict[int, Tensor]:
        """The part of a vector that belongs to each tensor of the model, by the tensor's `id`, on its device."""
        parts = torch.split(vector, self._sizes)
        return {
            key: parts[index].view(self._tensors[index].shape).to(self._tensors[index])
            for key, index in self._places.items()
        }
