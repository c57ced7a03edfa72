"""State of model and optimizer as whole tensors by parameter name, for every strategy and world size.

Sharded tensors are gathered when saved and sharded again when loaded. Names survive wrapping, parameter indices do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.state.held_tensors import (
    DimRun,
    WholeLayout,
    local_part_of,
    shard_bounds,
    shard_layout,
    whole_layout,
    whole_runs,
)

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile add to names."""


def plain_name(name: str) -> str:
    """A parameter's name in the model without wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by plain name; a shared one under its first name."""
    return {plain_name(name): param for name, param in model.named_parameters()}


def shared_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a tensor of the model's state to its first one, plain names."""
    first: dict[int, str] = {}
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        plain = plain_name(name)
        known = first.setdefault(id(value), plain)
        if known != plain:
            found[plain] = known
    return found


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or a sharded one gathered; then every rank of its mesh calls this."""
    from torch.distributed.tensor import DTensor  # takes a second to import, which data-parallel jobs need not spend

    if isinstance(tensor, DTensor):
        gathered: Tensor = tensor.full_tensor()
        return gathered
    return tensor


def part_of(value: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole `value`, equal on all ranks, sharded like `like`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    # src_data_rank=None: every rank takes its own part; nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


class StateParts:
    """How this rank holds the tensors of a model: whole, or as shards (DTensors). A split model overrides it.

    Every rank calls the methods that communicate with the same names in the same order.
    """

    def first_name(self, name: str) -> str:
        """The name under which a parameter is saved."""
        return name

    def check(self, name: str, param: Tensor, optimizer: Optimizer) -> None:
        """Raise InvalidArgument if the optimizer's values for a parameter cannot be joined."""

    def joined(self, name: str, value: Tensor) -> Tensor:
        """The whole of a tensor of which this rank holds a part."""
        return whole(value.detach())

    def from_owner(self, name: str, value: Tensor) -> Tensor:
        """The whole of one of the model's tensors, also where another rank holds it."""
        return self.joined(name, value)

    def part(self, name: str, value: Tensor, like: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the form of `like`."""
        return part_of(value, like)

    def all_groups(self, mine: list[list[str]]) -> list[list[str]]:
        """The names in the optimizer's groups, also those that only other ranks hold."""
        return mine

    def all_values(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The optimizer's values by parameter name, also those that only other ranks hold."""
        return mine

    def runs(self, name: str, shape: Sequence[int]) -> tuple[list[int], list[list[DimRun]]]:
        """The whole shape of a tensor of which this rank holds, before sharding, one of `shape`, and its runs."""
        return list(shape), whole_runs(shape)

    def like(self, param: Tensor) -> Tensor:
        """The tensor as which the optimizer keeps its state of a parameter."""
        return param

    def keeps(self, param: Tensor) -> bool:
        """Whether this rank keeps the optimizer's state of a parameter it holds, or a part of it."""
        return True

    def all_plain(self, mine: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Values that are not tensors by parameter name, also those that only other ranks hold."""
        return mine

    def layout(self, name: str, value: Tensor) -> WholeLayout:
        """Which part of the whole tensor this rank's `value` is: a piece of it, whole or as a shard (DTensor)."""
        if type(self).runs is StateParts.runs and not hasattr(value, "device_mesh"):
            return whole_layout(tuple(value.shape))
        shape, runs = self.runs(name, value.shape)
        starts, sizes = shard_bounds(value)
        covered = tuple(tuple(one) for one in runs)
        return shard_layout(tuple(shape), covered, tuple(starts), tuple(sizes), tuple(local_part_of(value).shape))

    def fits(self, mine: list[list[str]], saved: list[list[str]]) -> bool:
        """Whether the optimizer's groups on this rank are those of a saved state."""
        return mine == saved


_SHARDS = StateParts()


def model_state(model: nn.Module, parts: StateParts = _SHARDS) -> dict[str, Any]:
    """`model.state_dict()` with plain names and whole tensors, equal on every rank; all ranks call this."""
    return dict(iterate_model_state(model, parts))


def iterate_model_state(model: nn.Module, parts: StateParts = _SHARDS) -> Iterator[tuple[str, Any]]:
    """`model_state` one entry at a time, so at most one whole tensor is held; all ranks iterate to the end."""
    for name, value in model.state_dict().items():
        plain = plain_name(name)
        yield plain, parts.from_owner(plain, value) if isinstance(value, Tensor) else value


def load_model_state(model: nn.Module, state: Mapping[str, Any], parts: StateParts = _SHARDS) -> None:
    """Load this rank's part of `model_state`; a name or shape that does not fit raises InvalidArgument."""
    require_same_names(model.state_dict(), state)
    load_some_state(model, state, parts)


def load_some_state(model: nn.Module, state: Mapping[str, Any], parts: StateParts = _SHARDS) -> None:
    """`load_model_state` of some of the model's names; the rest stays as it is."""
    held = model.state_dict()
    own = {plain_name(name): name for name in held}
    loaded: dict[str, Any] = {}
    for name, value in state.items():
        here = held[own[name]]
        if isinstance(value, Tensor):
            if here.is_meta:  # held by another rank
                continue
            value = parts.part(name, value, here)  # noqa: PLW2901 (the part takes its place)
            require_same_shape(name, value, here)
        loaded[own[name]] = value
    model.load_state_dict(loaded, strict=len(loaded) == len(held))


def optimizer_state(model: nn.Module, optimizer: Optimizer, parts: StateParts = _SHARDS) -> dict[str, Any]:
    """`optimizer.state_dict()` with names in place of indices and whole tensors; all ranks call this."""
    names = _names(model, parts)
    for param in optimizer.state:
        parts.check(names[id(param)], param, optimizer)
    mine = {
        names[id(param)]: {
            key: parts.joined(names[id(param)], value) if isinstance(value, Tensor) else value
            for key, value in optimizer.state[param].items()
        }
        for group in optimizer.param_groups
        for param in group["params"]
        if param in optimizer.state
    }
    groups = parts.all_groups([[names[id(param)] for param in group["params"]] for group in optimizer.param_groups])
    state = parts.all_values(mine)
    return {
        "state": {name: state[name] for group in groups for name in group if name in state},
        "param_groups": [
            {**_settings(group), "params": params} for group, params in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any], parts: StateParts = _SHARDS
) -> None:
    """Load this rank's part of `optimizer_state`; the groups must hold the same parameters in the same order."""
    names = _names(model, parts)
    mine = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    saved = [list(group["params"]) for group in state["param_groups"]]
    if not parts.fits(mine, saved):
        raise InvalidArgument(
            "the state is of an optimizer with other parameters or groups",
            hint="build the optimizer as it was when the state was made",
            groups=[len(group) for group in mine],
            state_groups=[len(group) for group in saved],
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    index = {id(param): number for number, param in enumerate(params)}
    values = {
        index[id(param)]: {
            key: parts.part(names[id(param)], value, param) if isinstance(value, Tensor) else value
            for key, value in state["state"][names[id(param)]].items()
        }
        for param in params
        if names[id(param)] in state["state"] and parts.keeps(param)
    }
    groups = [
        {**_settings(given), "params": [index[id(param)] for param in group["params"]]}
        for given, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def _names(model: nn.Module, parts: StateParts) -> dict[int, str]:
    return {id(param): parts.first_name(name) for name, param in named_params(model).items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def require_same_names(held: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, str]:
    """Plain name to name in the model's own state; InvalidArgument unless the names of `state` are just those."""
    own = {plain_name(name): name for name in held}
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise InvalidArgument(
            "the state is not of this model: names differ",
            hint="build the model as it was when the state was made",
            missing=missing[:3] or None,
            unknown=unknown[:3] or None,
        )
    return own


def require_same_shape(name: str, value: Tensor, held: Tensor) -> None:
    """Raise InvalidArgument unless a tensor of the state has the shape of the one it replaces."""
    if value.shape != held.shape:
        raise InvalidArgument(
            f"the state is not of this model: {name} differs",
            hint="build the model as it was when the state was made",
            state=tuple(value.shape),
            model=tuple(held.shape),
        )


def carried(values: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """The optimizer's values for a parameter, sharded like the parameter."""
    return {key: part_of(value, param) if isinstance(value, Tensor) else value for key, value in values.items()}
