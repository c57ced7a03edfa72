"""What a plan does to a model, before anything is changed: it is built on the meta device, and no rank is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import nn

    from torsh_distributed.plan import Plan


def describe_model(model: nn.Module, plan: Plan) -> Iterator[RenderableType]:
    """The model's parts; then what tensor, expert and shard axes of the plan do to them."""
    from torsh_distributed.parallel.expert.choose import check_experts
    from torsh_distributed.parallel.expert.placed_experts import placed_experts, spread_names
    from torsh_distributed.parallel.models.anatomy import anatomy_of
    from torsh_distributed.parallel.models.wrapping import pieces_of
    from torsh_distributed.parallel.tensor import find_tensor_plan

    anatomy = anatomy_of(model)
    num_params = sum(param.numel() for param in model.parameters())
    lists = ", ".join(
        f"{name} ({sum(one.startswith(f'{name}.') for one in anatomy.layers)})" for name in anatomy.layer_lists
    )
    yield f"{type(model).__name__}: {num_params:,} parameters; blocks: {lists}; {anatomy.source}"
    for what, names in (("embeddings", anatomy.embeddings), ("norms", anatomy.norms), ("rotary", anatomy.rotary)):
        if names:
            yield f"{what}: {', '.join(names)}"
    if anatomy.head is not None:
        yield f"head: {anatomy.head}"
    for group in anatomy.tied:
        yield f"tied: {' = '.join(group)}"
    check_experts(model, plan)
    if plan.mesh.ep > 1:
        for name, placed in placed_experts(model).items():
            yield f"{name}: {placed.num_experts} experts, {placed.num_experts // plan.mesh.ep} on each rank along ep"
    if plan.mesh.shard > 1:
        pieces = pieces_of(model, plan.fsdp)
        yield f"gathered as one piece each: {len(pieces)} modules, {', '.join([*pieces][:2])}, …; then the rest"
    if plan.mesh.tp > 1:
        tensors = find_tensor_plan(model, tp=plan.mesh.tp, config=plan.tensor, spread=spread_names(model, plan.mesh.ep))
        yield tensors.describe_patterns()
