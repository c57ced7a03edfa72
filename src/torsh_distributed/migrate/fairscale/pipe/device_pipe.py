"""FairScale's Pipe: the layers of an nn.Sequential on several devices of one process, on one microbatch after another.

A forward runs stage j on microbatch i at clock i + j, so that devices that compute asynchronously work at the same
time; autograd walks the same path back. Between processes use `mesh.pp` of a plan instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed
from typing_extensions import override

from torsh_distributed.migrate.fairscale.pipe.deferred_batch_norm import commit_batch_norms, defer_batch_norms
from torsh_distributed.migrate.fairscale.pipe.skip_connections import SkipShelf, using_shelf, verify_skippables
from torsh_distributed.migrate.fairscale.recomputing import enable_checkpointing, enable_recomputing

Value = Tensor | tuple[Tensor, ...]

_CHECKPOINT_MODES = ("always", "except_last", "never")


class Pipe(nn.Module):
    """A sequential module whose stages are on `devices`; called like it, with a batch that is cut into `chunks`.

    `balance` gives the number of layers of each stage. `checkpoint` says which microbatches backward recomputes; their
    buffers, such as running means, see the batch once. With `deferred_batch_norm` running means move once for a batch,
    as without a pipe, and not for every microbatch. The loss's targets belong on `devices[-1]`. Outputs have the order
    of the batch. As in FairScale, losses and errors of arguments are ValueError, TypeError and IndexError.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if balance is None:
            raise ValueError("balance is required: the number of layers in each stage, such as balance_by_time() gives")
        if int(chunks) <= 0:
            raise ValueError("number of chunks must be positive integer")
        if checkpoint not in _CHECKPOINT_MODES:
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        _check_module(module)
        verify_skippables(module)
        if deferred_batch_norm:
            defer_batch_norms(module)
        self.balance = _checked_balance(balance, module)
        self.chunks = int(chunks)
        self.checkpoint = checkpoint
        found = range(torch.cuda.device_count()) if devices is None else devices
        self.devices = [torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in found]
        if len(self.balance) > len(self.devices):
            raise IndexError(
                f"too few devices to hold given partitions (devices: {len(self.devices)}, partitions: "
                f"{len(self.balance)})"
            )
        del self.devices[len(self.balance) :]
        self.partitions = nn.ModuleList(_cut(module, self.balance, self.devices))

    @override
    def forward(self, batch: Value) -> Value:
        is_single = isinstance(batch, Tensor)
        if not is_single and not all(isinstance(one, Tensor) for one in batch):
            raise TypeError(f"expected a tensor or a tuple of tensors, but got {type(batch).__name__}")
        values = _chunks(batch, self.chunks)
        shelves = [SkipShelf() for _ in values]
        for clock in range(len(values) + len(self.partitions) - 1):
            # The last stage first: it frees what the ones before it are about to fill.
            for stage in reversed(range(len(self.partitions))):
                index = clock - stage
                if 0 <= index < len(values):
                    is_recomputed = self._is_recomputed(index)
                    values[index] = self._run(stage, values[index], shelves[index], is_recomputed=is_recomputed)
        commit_batch_norms(self.partitions)
        return _joined(values)

    def _is_recomputed(self, index: int) -> bool:
        last = {"always": self.chunks, "except_last": self.chunks - 1, "never": 0}[self.checkpoint]
        return self.training and torch.is_grad_enabled() and index < last

    def _run(self, stage: int, value: Value, shelf: SkipShelf, *, is_recomputed: bool) -> Value:
        layers, device = self.partitions[stage], self.devices[stage]
        here: Value = (
            value.to(device, non_blocking=True)
            if isinstance(value, Tensor)
            else tuple(one.to(device, non_blocking=True) for one in value)
        )
        with using_shelf(shelf):
            if not is_recomputed:
                out: Value = layers(here)
                return out
            again: Value = recomputed(layers, here, use_reentrant=False, context_fn=lambda: _contexts(layers, shelf))
            return again

    def __len__(self) -> int:
        """Layers in all stages."""
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        """A layer, by its place in the module."""
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        for stage in self.partitions:
            assert isinstance(stage, nn.Sequential), "as they were cut"
            yield from stage

    @override
    def cuda(self, device: Any = None) -> NoReturn:
        raise _moving_denied()

    @override
    def cpu(self) -> NoReturn:
        raise _moving_denied()

    @override
    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Cast the model; its devices are those of the pipe."""
        moves = any(isinstance(one, torch.device | int | str | Tensor) for one in args[:1])
        if moves or "device" in kwargs or "tensor" in kwargs:
            raise _moving_denied()
        super().to(*args, **kwargs)
        return self


def _moving_denied() -> TypeError:
    return TypeError("denied to move parameters and buffers, because Pipe should manage device placement")


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Sequential):
        raise TypeError("module must be nn.Sequential to be partitioned")
    children = list(module.children())
    if len(children) != len({id(child) for child in children}):
        raise ValueError("module with duplicate children is not supported")


def _checked_balance(balance: Iterable[int], module: nn.Sequential) -> list[int]:
    counts = list(balance)
    if len(module) != sum(counts):
        raise ValueError(
            "module and sum of balance have different length "
            f"(module: {len(module)}, sum of balance: {sum(counts)}); balance_by_time() finds one that fits"
        )
    if any(count <= 0 for count in counts):
        raise ValueError(f"all balance numbers must be positive integer (balance: {counts})")
    return counts


def _cut(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> Iterator[nn.Sequential]:
    """The stages, with the layers' names, each on its device."""
    named = iter(module.named_children())
    seen: dict[nn.Parameter, torch.device] = {}
    for count, device in zip(balance, devices, strict=True):
        stage = nn.Sequential()
        for _ in range(count):
            stage.add_module(*next(named))
        for param in stage.parameters():
            if seen.setdefault(param, device) != device:
                raise ValueError("module with duplicate parameters on distinct devices is not supported")
        yield stage.to(device)


def _chunks(batch: Value, count: int) -> list[Value]:
    if isinstance(batch, Tensor):
        return list(batch.chunk(count))
    return list(zip(*(one.chunk(count) for one in batch), strict=True))


def _joined(values: Sequence[Value]) -> Value:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat([one for one in values if isinstance(one, Tensor)])
    return tuple(torch.cat(parts) for parts in zip(*values, strict=True))


def _contexts(layers: nn.Module, shelf: SkipShelf) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward of a stage and around the second, which leaves buffers as they were."""
    return enable_checkpointing(), _second_forward(layers, shelf)


@contextmanager
def _second_forward(layers: nn.Module, shelf: SkipShelf) -> Iterator[None]:
    before = [buffer.clone() for buffer in layers.buffers()]
    with enable_recomputing(), using_shelf(shelf, is_again=True):
        try:
            yield
        finally:
            for buffer, value in zip(layers.buffers(), before, strict=True):
                buffer.data.copy_(value)
