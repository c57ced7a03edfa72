"""Cuts the parameters of a module to this rank's pieces, in place: they keep their identity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from torsh_distributed.errors import InvalidArgument


@dataclass(frozen=True)
class TensorCut:
    """A cut along `dim`, like torch.chunk: the last pieces may be smaller, or empty.

    With `sections` the dim holds several adjacent matrices, such as query, key and value in one linear layer: every
    rank gets its piece of each.
    """

    dim: int
    sections: tuple[int, ...] = ()

    def part(self, whole: Tensor, *, rank: int, size: int) -> Tensor:
        """The piece of `rank` among `size`, a copy."""
        pieces = [_chunk(section, self.dim, rank, size) for section in self._sections_of(whole)]
        return torch.cat(pieces, dim=self.dim).contiguous()

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the pieces of all ranks, in order."""
        if not self.sections:
            return torch.cat(list(parts), dim=self.dim)
        size = len(parts)
        cuts = [
            torch.split(part, [_chunk_length(length, rank, size) for length in self.sections], dim=self.dim)
            for rank, part in enumerate(parts)
        ]
        return torch.cat([torch.cat(pieces, dim=self.dim) for pieces in zip(*cuts, strict=True)], dim=self.dim)

    def runs(self, whole: int, *, rank: int, size: int) -> list[tuple[int, int, int]]:
        """The rank's piece of a dim of length `whole`: (start in the whole, start in the piece, length) of each run."""
        found, before, held = [], 0, 0
        for section in self.sections or (whole,):
            start, stop = bounds(section, rank=rank, size=size)
            if stop > start:
                found.append((before + start, held, stop - start))
            before, held = before + section, held + stop - start
        return found

    def length(self, whole: int, *, rank: int, size: int) -> int:
        """How much of a dim of length `whole` the rank keeps."""
        return sum(_chunk_length(length, rank, size) for length in self.sections or (whole,))

    def shape(self, whole: Sequence[int], *, rank: int, size: int) -> tuple[int, ...]:
        """The shape of the piece of a tensor of shape `whole`."""
        out = list(whole)
        out[self.dim] = self.length(out[self.dim], rank=rank, size=size)
        return tuple(out)

    def _sections_of(self, whole: Tensor) -> Sequence[Tensor]:
        if not self.sections:
            return (whole,)
        if sum(self.sections) != whole.shape[self.dim]:
            raise InvalidArgument(
                f"sections {self.sections} do not add up to dim {self.dim} of the tensor",
                hint="give the length of every matrix in the fused layer",
                shape=tuple(whole.shape),
            )
        return torch.split(whole, list(self.sections), dim=self.dim)


def bounds(whole: int, *, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of a rank's piece of a dim of length `whole`."""
    step = -(-whole // size)
    return min(rank * step, whole), min((rank + 1) * step, whole)


def _chunk(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    start, stop = bounds(tensor.shape[dim], rank=rank, size=size)
    return tensor.narrow(dim, start, stop - start)


def _chunk_length(whole: int, rank: int, size: int) -> int:
    start, stop = bounds(whole, rank=rank, size=size)
    return stop - start


_MARK = "_torsh_cut"
"""Set on a parameter that holds a piece: how it was cut. Keeps tied parameters from being cut twice."""

_LENGTH = "_torsh_whole_length"
"""Set beside it: the length of the cut dim in the whole parameter."""

_CUTS = "_torsh_cuts"
"""Set on a module: name of its own parameter to its cut and the whole length of the dim.

Wrappers such as FSDP2 replace parameters, not modules.
"""


def split_param(owner: nn.Module, name: str, cut: TensorCut, group: dist.ProcessGroup) -> None:
    """Reduce a parameter of `owner` to this rank's piece of the first rank's values; a tied one is cut once."""
    param = owner._parameters[name]
    assert param is not None, "the caller looks"
    whole_length = getattr(param, _LENGTH, param.shape[cut.dim])
    owner.__dict__.setdefault(_CUTS, {})[name] = (cut, whole_length)
    if getattr(param, _MARK, None) == cut:
        return
    if hasattr(param, _MARK):
        raise InvalidArgument(
            "a tied parameter would be cut in two ways",
            hint="override one of the layers that share it, so both are cut along the same dim",
            first=getattr(param, _MARK),
            second=cut,
        )
    replicate_param(param, group)
    param.data = cut.part(param.data, rank=group.rank(), size=group.size())
    setattr(param, _MARK, cut)
    setattr(param, _LENGTH, whole_length)


def replicate_param(param: Tensor, group: dist.ProcessGroup) -> None:
    """Broadcast the first rank's values to every rank."""
    if param.device.type != "meta" and not hasattr(param, _MARK):
        param.data = param.data.contiguous()
        dist.broadcast(param.data, group=group, group_src=0)


def param_cuts(model: nn.Module) -> dict[str, TensorCut]:
    """Name to cut, for every parameter of which this rank holds a piece; a tied one under each of its names."""
    return {name: cut for name, (cut, _) in _cuts_and_lengths(model).items()}


def cut_lengths(model: nn.Module) -> dict[str, int]:
    """Name to the length that the cut dim has in the whole parameter, for those of `param_cuts`."""
    return {name: length for name, (_, length) in _cuts_and_lengths(model).items()}


def _cuts_and_lengths(model: nn.Module) -> dict[str, tuple[TensorCut, int]]:
    found: dict[int, tuple[TensorCut, int]] = {}
    for module in model.modules():
        for name, entry in module.__dict__.get(_CUTS, {}).items():
            found[id(module._parameters[name])] = entry
    named = model.named_parameters(remove_duplicate=False)
    return {name: found[id(param)] for name, param in named if id(param) in found}


def own_cuts(module: nn.Module) -> dict[str, TensorCut]:
    """Name to cut, for the module's own parameters that are split."""
    return {name: cut for name, (cut, _) in module.__dict__.get(_CUTS, {}).items()}


def adopt(layer: nn.Module, source: nn.Module) -> None:
    """Give `layer` the same parameters, buffers, hooks and settings as `source`."""
    layer.__dict__.update(source.__dict__)
    layer._parameters = dict(source._parameters)


def can_be_split(module: nn.Module, plain: type[nn.Module]) -> bool:
    """Whether the forward of a layer is that of `plain`, extends it, or gives the same."""
    if not isinstance(module, plain) or type(module).forward is plain.forward:
        return True
    if _calls_super(module):
        return True
    if not any(param.is_meta for param in module.parameters()):
        return _computes_like(module, plain)
    # Tried on numbers of our own, so equal layers give equal answers: a model of billions repeats a few.
    key = (type(module), plain, _settings(module))
    if key not in _TRIED:
        _TRIED[key] = _computes_like(module, plain)
    return _TRIED[key]


_TRIED: dict[tuple[type[nn.Module], type[nn.Module], str], bool] = {}


def _settings(module: nn.Module) -> str:
    """All that a layer without values consists of."""
    own = (*module.named_parameters(), *module.named_buffers())
    tensors = [(name, tuple(one.shape), one.dtype) for name, one in own]
    return repr((module, tensors, {name: value for name, value in vars(module).items() if not name.startswith("_")}))


def class_for(kind: type[nn.Module], source: nn.Module, plain: type[nn.Module]) -> type[nn.Module]:
    """`kind`, or for a `source` that extends the forward of `plain` a class that extends that of `kind` likewise."""
    if isinstance(source, plain) and type(source).forward is not plain.forward and _calls_super(source):
        return type(f"Split{type(source).__name__}", (type(source), kind), {})
    return kind


def _calls_super(module: nn.Module) -> bool:
    """Whether the forward of a module's class calls that of the class before it."""
    return "__class__" in type(module).forward.__code__.co_freevars


@torch.no_grad()
def _computes_like(module: nn.Module, plain: type[nn.Module]) -> bool:
    """Whether a module with a forward of its own gives what `plain` gives, tried on a few numbers."""
    values = {name: _numbers(one) for name, one in (*module.named_parameters(), *module.named_buffers())}
    weight = values["weight"]
    if issubclass(plain, nn.Embedding):
        inputs = torch.arange(min(4, weight.shape[0]), device=weight.device)
        expected = functional.embedding(inputs, weight)
    else:
        steps = torch.arange(2 * weight.shape[1], device=weight.device, dtype=torch.float32)
        inputs = steps.sin().to(weight.dtype).view(2, -1)
        expected = functional.linear(inputs, weight, values.get("bias"))
    found = functional_call(module, values, (inputs,))
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-5)


def _numbers(tensor: Tensor) -> Tensor:
    """The values of a tensor, or some if it is on meta."""
    if not tensor.is_meta:
        return tensor
    width = max(1, tensor.shape[-1] if tensor.dim() else 1)
    values = torch.arange(tensor.numel(), dtype=torch.float32).sin() / math.sqrt(width)
    return values.to(tensor.dtype).view(tensor.shape)
