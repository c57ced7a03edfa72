"""Applies tensor parallelism to a model, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.tensor.cut import TensorCut
from torsh_distributed.parallel.tensor.head_sharding import register_cpu_attention
from torsh_distributed.parallel.tensor.layers import (
    Activation,
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    keeps_logits_split,
    replicate_param,
)
from torsh_distributed.parallel.tensor.sequence import work_on_sequence
from torsh_distributed.parallel.tensor.structure import is_head
from torsh_distributed.parallel.tensor.tensor_plan import PlannedModule, SplitStyle, TensorPlan, find_tensor_plan
from torsh_distributed.plan.sections.axes.tensor import TensorConfig

_OUTPUTS: dict[SplitStyle, Activation] = {
    SplitStyle.COLUMN: "sharded",
    SplitStyle.COLUMN_LOCAL: "local",
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
        )
    register_cpu_attention()
    here = dict(model.named_modules(remove_duplicate=False))
    group = mesh.get_group()
    done: set[int] = set()
    for row in chosen.modules:
        if row.name not in here:
            continue  # in another pipeline stage
        _apply(model, here[row.name], row, mesh, chosen.config)
        done.add(id(here[row.name]))
    for module in model.modules():
        if id(module) not in done:
            for param in module.parameters(recurse=False):
                replicate_param(param, group)
    return chosen


def _apply(root: nn.Module, module: nn.Module, row: PlannedModule, mesh: DeviceMesh, config: TensorConfig) -> None:
    on_sequence = config.sequence_parallel
    if row.style in _OUTPUTS:
        assert isinstance(module, nn.Linear), "the plan checks this"
        assert row.cut is not None, "these styles have one"
        column = ColumnParallelLinear.from_linear(module, mesh, output=_OUTPUTS[row.style], sections=row.cut.sections)
        column.is_head = row.style is SplitStyle.COLUMN and is_head(row.name, module)
        new: nn.Module = column
    elif row.style is SplitStyle.ROW:
        assert isinstance(module, nn.Linear), "the plan checks this"
        new = RowParallelLinear.from_linear(module, mesh, sequence_output=on_sequence)
    elif row.style is SplitStyle.VOCABULARY:
        assert isinstance(module, nn.Embedding), "the plan checks this"
        new = ParallelEmbedding.from_embedding(module, mesh, sequence_output=on_sequence)
    else:
        if row.style is SplitStyle.SEQUENCE:
            work_on_sequence(module, mesh)
        for param in module.parameters(recurse=False):
            replicate_param(param, mesh.get_group())
        return
    parent, _, child = row.name.rpartition(".")
    root.get_submodule(parent).register_module(child, new)


def param_cuts(model: nn.Module) -> dict[str, TensorCut]:
    """Name to cut, for every parameter of which this rank holds a piece; a tied one under each of its names."""
    cuts: dict[str, TensorCut] = {}
    for where, module in model.named_modules():
        cut = getattr(module, "cut", None)
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | ParallelEmbedding):
            continue
        assert isinstance(cut, TensorCut), "split layers have one"
        names = ["weight"]
        if isinstance(module, ColumnParallelLinear) and module.bias is not None:
            names.append("bias")
        cuts.update({f"{where}.{name}" if where else name: cut for name in names})
    return cuts


def cut_lengths(model: nn.Module) -> dict[str, int]:
    """Name to the length that the cut dim has in the whole parameter, for those of `param_cuts`."""
    lengths: dict[str, int] = {}
    for name in param_cuts(model):
        layer = model.get_submodule(name.rpartition(".")[0])
        whole = layer.whole_embeddings if isinstance(layer, ParallelEmbedding) else layer.whole_features
        assert isinstance(whole, int), "split layers know their whole size"
        lengths[name] = whole
    return lengths


@contextmanager
def tensor_parallel_context(plan: TensorPlan) -> Iterator[None]:
    """Around forward, loss and backward of a tensor-parallel model.

    Inside, plain tensors combined with split activations count as whole (masks, rotary tables), and with
    `tensor.loss_parallel` cross-entropy works on split logits.
    """
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
