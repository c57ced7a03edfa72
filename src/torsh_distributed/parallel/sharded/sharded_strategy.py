"""The strategy for `mesh.shard`: adapts FullyShardedDataParallel to the Engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import ConfigurationError, first_line
from torsh_distributed.parallel.mesh.mesh_reduction import MeshStrategy, mean_over
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.strategy import ComputeLoss, LossFn, PendingNumber
from torsh_distributed.parallel.whole_tensors.model_pieces import ModelPieces, shard_form
from torsh_distributed.plan import FsdpConfig


class Sharded(MeshStrategy):
    """Shards of parameters, gradients and optimizer state, gathered and reduced piece by piece (ZeRO-2 and ZeRO-3)."""

    def __init__(self, wrapped: FullyShardedDataParallel) -> None:
        self.wrapped = wrapped
        super().__init__(wrapped.mesh)
        # FSDP2 has no slot to time the sum over replicas of shards, and the host does not see a GPU's work.
        self._is_timed = self._mesh.layout.degree("dp", "ep", "cp") == 1 and self._mesh.device_type == "cpu"

    @property
    @override
    def model(self) -> nn.Module:
        return self.wrapped

    @property
    @override
    def follows_freezing(self) -> bool:
        return True

    @override
    def pieces(self) -> ModelPieces | None:
        sharded = next((param for param in self.unwrapped.parameters() if isinstance(param, DTensor)), None)
        if sharded is None:
            return None
        return ModelPieces(self._mesh.group("shard"), (shard_form(sharded.device_mesh),))

    @override
    def use_prefetch(self, config: FsdpConfig) -> None:
        self.wrapped.use_prefetch(config)

    @override
    def attach(self, optimizer: Optimizer) -> None:
        self.wrapped.attach(optimizer)

    @override
    def loss(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, compute: ComputeLoss) -> Tensor:
        try:
            loss = super().loss(model, batch, loss_fn, compute)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise _reads_shards(first_line(error)) from error
        if isinstance(loss, DTensor):  # torch adds a plain number and a DTensor, and raises in backward
            raise _reads_shards("the loss is a DTensor")
        return loss

    @override
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return self._syncing(is_last)

    @contextmanager
    def _syncing(self, is_syncing: bool) -> Iterator[None]:
        self.wrapped.set_gradient_sync(is_syncing)
        try:
            yield
        finally:
            self.wrapped.set_gradient_sync(True)

    @override
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        return mean_over(loss, self._mesh.data_group)

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return self.wrapped.clip_grad_norm(max_norm)

    @override
    def take_comm_s(self) -> float | None:
        waited_s = self.wrapped.tally.take_s()
        return waited_s if self._is_timed else None

    @override
    def reshard(self) -> None:
        self.wrapped.reshard()

    @property
    @override
    def compressor(self) -> GradientCompressor | None:
        return self.wrapped.compressor


def _reads_shards(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the model or its loss reads parameters outside of the module they belong to, where they are shards: {what}",
        hint="call full_tensor() on what is computed from them, such as a penalty, before it meets other tensors; or"
        " use mesh.dp, where parameters are whole",
        key="mesh.shard",
    )
