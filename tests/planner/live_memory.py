"""The memory of a real training, counted by storages: what an estimate is compared with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torsh_distributed as td
from torsh_distributed.train.demos.gpt import CONTEXT, CharGPT
from torsh_distributed.train.speed.linear_cross_entropy import _losses_and_gradients

_OWN = {"torsh.linear_cross_entropy.default": _losses_and_gradients._init_fn}
"""Operations written in Python: what they do is seen where they are entered with the mode on."""


class LiveMemory(TorchDispatchMode):
    """Bytes of all storages that were made inside it and not yet freed, and the peak since it was last reset.

    Operations on DTensors are left to them: what they do with local tensors comes here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def now(self) -> int:
        # Summed each time: FSDP2 frees what it gathered by making storages smaller, which is no operation.
        return sum(storage.nbytes() for one in list(self._storages.values()) if (storage := one()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))
        if any(kind not in (Tensor, nn.Parameter, torch.nn.Buffer) for kind in types):
            return NotImplemented
        own = _OWN.get(str(func))
        if own is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = own(*args, **(kwargs or {}))
        given = {self._key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and not leaf.is_meta and self._key(leaf) not in given | self._storages.keys():
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _key(self, tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":  # of a fake tensor, made while a model is traced: it has no memory
            return
        key = storage._cdata
        self._storages[key] = weakref.ref(storage)
        weakref.finalize(storage, self._storages.pop, key, None)


LARGE_VOCABULARY = 32_768


class Wide(nn.Module):
    """A stack of feed-forward blocks: most of its memory are parameters."""

    def __init__(self, width: int = 512, num_layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        out: Tensor = self.head(hidden)
        return out


def char_gpt() -> nn.Module:
    """Most of its memory are activations."""
    return CharGPT(96, width=96, num_layers=4, num_heads=4)


def wide() -> nn.Module:
    """Most of its memory are parameters."""
    return Wide()


def large_vocabulary() -> nn.Module:
    """Most of its memory would be logits."""
    return CharGPT(LARGE_VOCABULARY, width=32, num_layers=2, num_heads=2)


def batch_for(model: nn.Module, num_samples: int) -> tuple[Tensor, Tensor]:
    if isinstance(model, Wide):
        return torch.zeros(num_samples, 64), torch.zeros(num_samples, dtype=torch.int64)
    ids = torch.arange(num_samples * CONTEXT).remainder(96).view(num_samples, CONTEXT)
    return ids, ids


def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, -2), targets.flatten())


def measured_peak_of_lengths(build: Callable[[], nn.Module], plan: td.Plan, lengths: Sequence[int]) -> int:
    """Runs on one rank: the peak over steps whose batches have these lengths, after one that makes the state."""
    torch.manual_seed(0)
    with LiveMemory() as live:
        model = build()
        ids, targets = batch_for(model, plan.training.batch_size)
        engine = td.parallelize(model, torch.optim.AdamW, plan, loss_fn=loss_fn)
        del model
        for length in (lengths[0], *lengths):
            gc.collect()
            engine.step((ids[:, :length], targets[:, :length]))
        return live.peak


def measured_peak(build: Callable[[], nn.Module], plan: td.Plan) -> int:
    """Runs on every rank: the peak of the third step of a real training, parameters and state included."""
    torch.manual_seed(0)
    with LiveMemory() as live:
        model = build()
        inputs = batch_for(model, plan.training.batch_size)
        engine = td.parallelize(model, torch.optim.AdamW, plan, loss_fn=loss_fn)
        del model
        for _ in range(3):
            gc.collect()
            live.peak = live.now
            share = plan.resolve(torch.distributed.get_world_size()).mesh.data_degree
            engine.step(tuple(one[: len(one) // share] for one in inputs))
        return live.peak
