"""Applies tensor parallelism to a model, in place.

Lets DTensor run CPU attention split by heads: torch registers the rules for CUDA kernels only.
Dropped once torch has a rule for `_scaled_dot_product_flash_attention_for_cpu` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.parallel import loss_parallel

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.random_streams import draw_by_piece, draws_numbers, end_local_stream, share_random_state
from torsh_distributed.parallel.tensor import adapted
from torsh_distributed.parallel.tensor.adapted import work_on_sequence
from torsh_distributed.parallel.tensor.embedding import NarrowEmbedding, ParallelEmbedding
from torsh_distributed.parallel.tensor.layers import (
    Activation,
    ColumnParallelLinear,
    RowParallelLinear,
    keeps_logits_split,
)
from torsh_distributed.parallel.tensor.planning.planned_rows import PlannedModule, SplitStyle
from torsh_distributed.parallel.tensor.planning.tensor_plan import TensorPlan, find_tensor_plan
from torsh_distributed.parallel.tensor.split_params import replicate_param, split_param
from torsh_distributed.plan.sections.mesh import TensorConfig

_SPLITS = (Replicate(), Shard(0), Shard(1))
"""Attention mixes neither samples (dim 0) nor heads (dim 1)."""


@cache
def register_cpu_attention() -> None:
    """Tell DTensor how the CPU attention kernels may be split: whole, by sample or by head. Once per process."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    @register_sharding(forward)  # type: ignore[untyped-decorator]  # untyped in torch
    def _forward(*_: Any, attn_mask: Any = None, **__: object) -> list[Any]:
        # Positions: query, key, value, then dropout_p and is_causal where they are passed.
        return [([split] * 2, [split] * 3 + [None] * (len(_) - 3) + _mask(attn_mask)) for split in _SPLITS]

    @register_sharding(backward)  # type: ignore[untyped-decorator]  # untyped in torch
    def _backward(*_: Any, attn_mask: Any = None, **__: object) -> list[Any]:
        # Positions: grad_out, query, key, value, out, logsumexp, dropout_p, is_causal.
        return [([split] * 3, [split] * 6 + [None] * (len(_) - 6) + _mask(attn_mask)) for split in _SPLITS]


def _mask(mask: Any) -> list[Any]:
    return [] if mask is None else [Replicate()]


_OUTPUTS: dict[SplitStyle, Activation] = {
    SplitStyle.COLUMN: "sharded",
    SplitStyle.COLUMN_LOCAL: "local",
    SplitStyle.COLUMN_PACKED: "local",
    SplitStyle.COLUMN_GATHERED: "whole",
}


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    config: TensorConfig | None = None,
    *,
    overrides: Mapping[str, SplitStyle | str] | None = None,
    plan: TensorPlan | None = None,
) -> TensorPlan:
    """Split the model's layers over a mesh of one axis, in place; every rank of it calls this with the same model.

    The parameters keep their identity and names and hold this rank's pieces of the first rank's values: an optimizer
    built before keeps working. Returns the plan that was applied (`plan`, if given). Call the model, its loss and
    backward inside `tensor_parallel_context(plan)`.
    """
    chosen = plan or find_tensor_plan(model, tp=mesh.size(), config=config, overrides=overrides)
    if mesh.ndim != 1 or mesh.size() != chosen.tp:
        raise ConfigurationError(
            "tensor parallelism needs a mesh of one axis, of the planned size",
            hint='slice the mesh: device_mesh["tp"]',
            mesh=tuple(mesh.shape),
            tp=chosen.tp,
            key="mesh.tp",
        )
    register_cpu_attention()
    if mesh.device_type == "cpu":
        draw_by_piece()
    here = dict(model.named_modules(remove_duplicate=False))
    group = mesh.get_group()
    draws = draws_numbers(model)
    # Always: what a forward draws by a function shows only when it runs.
    share_random_state(group, next((param.device for param in model.parameters()), torch.device("cpu")))
    done: set[int] = set()
    for row in chosen.modules:
        owner, _, name = row.name.rpartition(".")
        if row.is_param and owner in here:
            if row.cut is not None:
                split_param(here[owner], name, row.cut, group)
            continue
        if row.name not in here:
            continue  # in another pipeline stage
        _apply(model, row, here, mesh, chosen.config, draws=draws)
        done.add(id(here[row.name]))
    for change in chosen.attributes:
        if change.module in here:
            setattr(model.get_submodule(change.module), change.name, change.value)
    for module in model.modules():
        if id(module) not in done:
            for param in module.parameters(recurse=False):
                replicate_param(param, group)
        if hasattr(module, "activation_relu_or_gelu"):  # torch's encoder layer would read split weights in evaluation
            setattr(module, "activation_relu_or_gelu", 0)  # noqa: B010 (typed for tensors and modules only)
    return chosen


def _apply(
    root: nn.Module,
    row: PlannedModule,
    here: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    config: TensorConfig,
    *,
    draws: bool,
) -> None:
    module = here[row.name]
    new = _split_layer(module, row, mesh, config)
    if new is None:
        _adapt(module, row, mesh)
        return
    if isinstance(new, ColumnParallelLinear):
        new.is_head, new.draws_numbers = row.is_head, draws
    for name, one in here.items():
        if one is module:  # a module may be known under several names
            parent, _, child = name.rpartition(".")
            root.get_submodule(parent).register_module(child, new)


def _split_layer(module: nn.Module, row: PlannedModule, mesh: DeviceMesh, config: TensorConfig) -> nn.Module | None:
    """The layer that takes the module's place; None for a style that leaves the module there."""
    on_sequence, sections = config.sequence_parallel, row.cut.sections if row.cut is not None else ()
    if row.style in _OUTPUTS:
        return ColumnParallelLinear.from_linear(module, mesh, output=_OUTPUTS[row.style], sections=sections)
    if row.style in (SplitStyle.ROW, SplitStyle.ROW_PACKED):
        return RowParallelLinear.from_linear(module, mesh, sequence_output=on_sequence, sections=sections)
    if row.style is SplitStyle.KEY_VALUE:
        assert isinstance(module, nn.Linear), "the plan checks this"
        num_heads, num_shared = row.detail
        return adapted.KeyValueLinear.from_linear(module, mesh, num_heads=num_heads, num_key_value_heads=num_shared)
    if row.style is SplitStyle.VOCABULARY:
        assert isinstance(module, nn.Embedding), "the plan checks this"
        return ParallelEmbedding.from_embedding(module, mesh, sequence_output=on_sequence)
    if row.style is SplitStyle.EMBEDDING_WIDTH:
        assert isinstance(module, nn.Embedding), "the plan checks this"
        return NarrowEmbedding.from_embedding(module, mesh)
    return None


def _adapt(module: nn.Module, row: PlannedModule, mesh: DeviceMesh) -> None:
    kinds: dict[SplitStyle, Callable[[], None]] = {
        SplitStyle.SHARED: lambda: adapted.adapt(module, adapted.SharedModule, mesh),
        SplitStyle.LATENT: lambda: adapted.adapt(module, adapted.LatentModule, mesh, tail=row.detail[0]),
        SplitStyle.EXPERTS: lambda: adapted.adapt(module, adapted.SplitExperts, mesh),
        SplitStyle.IDENTITY_EXPERT: lambda: adapted.adapt(module, adapted.IdentityExpert, mesh),
        SplitStyle.SUMMED: lambda: adapted.adapt(module, adapted.SummedModule, mesh),
        SplitStyle.SEQUENCE: lambda: work_on_sequence(module, mesh),
    }
    if row.style in kinds:
        kinds[row.style]()
        return
    for param in module.parameters(recurse=False):
        replicate_param(param, mesh.get_group())


@contextmanager
def tensor_parallel_context(plan: TensorPlan) -> Iterator[None]:
    """Around forward, loss and backward of a tensor-parallel model.

    Inside, plain tensors combined with split activations count as whole (masks, rotary tables), and with
    `tensor.loss_parallel` cross-entropy works on split logits.
    """
    try:
        with implicit_replication():
            if plan.config.loss_parallel:
                token = keeps_logits_split.set(True)
                try:
                    with loss_parallel():
                        yield
                finally:
                    keeps_logits_split.reset(token)
            else:
                yield
    finally:
        end_local_stream()  # where a forward was left between two layers by an error
