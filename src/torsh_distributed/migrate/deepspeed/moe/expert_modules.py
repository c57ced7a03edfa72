"""The experts of a layer: copies of a module, or stacks of their parameters, of which a rank may hold a part.

Our expert parallelism spreads stacks: parameters with an entry for each expert. So the experts of `ep_size > 1` are
stacked when an engine is made, and each is computed by one module with its entries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

_LIST = "deepspeed_experts"


class ExpertModules(nn.Module):
    """`deepspeed_experts`: the experts of a layer by number; or, once stacked, parameters named after theirs.

    Called with rows that have one expert each: (rows, width), and (rows, 1) their experts and weights.
    """

    def __init__(self, expert: nn.Module, num_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_experts))
        self.num_experts = num_experts
        """Those on this rank."""
        self.group_name = expert_group_name
        self.stack_names: dict[str, str] = {}
        """Attribute to the parameter's name in an expert; empty while experts are modules."""
        self.mark()

    @property
    def num_local_experts(self) -> int:
        """The experts on this rank."""
        return self.num_experts

    def mark(self) -> None:
        """Let scripts tell the parameters of experts from others, as DeepSpeed does."""
        for param in self.parameters():
            param.allreduce = False  # type: ignore[attr-defined]  # an attribute of DeepSpeed's
            param.group_name = self.group_name  # type: ignore[attr-defined]  # an attribute of DeepSpeed's

    def why_not_stacked(self) -> str | None:
        """Why these modules cannot become stacks; None if they can."""
        for expert in self.deepspeed_experts:
            named = list(expert.named_parameters(remove_duplicate=False))
            if any(True for _ in expert.buffers()):
                return "experts with buffers are not spread"
            if len({id(param) for _, param in named}) < len(named):
                return "experts that share parameters are not spread"
            dims = [param.dim() for _, param in named]
            if 0 in dims or 2 not in dims:
                return "experts without a matrix, or with single numbers, are not spread"
            if {name: param.requires_grad for name, param in named} != self._trained():
                return "experts that are frozen in part are not spread"
        return None

    def _trained(self) -> dict[str, bool]:
        return {name: param.requires_grad for name, param in self.deepspeed_experts[0].named_parameters()}

    def stack(self) -> list[tuple[nn.Parameter, list[nn.Parameter]]]:
        """Replace the modules by stacks of their parameters; returns each stack and what it is made of."""
        experts = list(self.deepspeed_experts)
        made: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        for name, is_trained in self._trained().items():
            parts = [expert.get_parameter(name) for expert in experts]
            stack = nn.Parameter(torch.stack([part.detach() for part in parts]), requires_grad=is_trained)
            self.stack_names[_attribute(name)] = name
            made.append((stack, parts))
        # Without values, and not a module of this one: it has no parameters to train.
        self.__dict__["_template"] = copy.deepcopy(experts[0]).to("meta")
        del self.deepspeed_experts
        for attribute, (stack, _) in zip(self.stack_names, made, strict=True):
            self.register_parameter(attribute, stack)
        self.mark()
        return made

    @override
    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """(rows, width): what each row's expert makes of it, times its weight."""
        chosen = experts.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        # An expert without rows runs on none: ranks then call the same experts, and all parameters get gradients.
        parts = torch.split(rows[order], counts)
        each = enumerate(zip(parts, self._states(), strict=True))
        done = [self._run(number, part, state) for number, (part, state) in each]
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return torch.cat(done)[inverse] * weights.reshape(-1, 1).to(done[0].dtype)

    def _states(self) -> Iterable[dict[str, Tensor] | None]:
        """For each expert its entries of the stacks; None if it is a module with its own."""
        if not self.stack_names:
            return [None] * self.num_experts
        # One unbind for each stack: its backward makes one gradient, not one of the whole stack for each expert.
        entries = {name: self.get_parameter(attribute).unbind(0) for attribute, name in self.stack_names.items()}
        return [{name: stack[number] for name, stack in entries.items()} for number in range(self.num_experts)]

    def _run(self, number: int, rows: Tensor, state: dict[str, Tensor] | None) -> Tensor:
        if state is None:
            result = self.deepspeed_experts[number](rows)
        else:
            template: nn.Module = self.__dict__["_template"]
            result = functional_call(template.train(self.training), state, (rows,))
        out: Tensor = result[0] if isinstance(result, tuple) else result
        return out

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A state in the other form is read too: stacks into modules, and modules into stacks."""
        if self.stack_names:
            given = as_stacked(state_dict, {f"{prefix}{key}": (prefix, name) for key, name in self.stack_names.items()})
        else:
            given = dict(as_listed(state_dict.items(), self._other_form(prefix)))
        state_dict.clear()
        state_dict.update(given)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _other_form(self, prefix: str) -> dict[str, tuple[str, str]]:
        return {f"{prefix}{_attribute(name)}": (prefix, name) for name in self._trained()}


Stacks = Mapping[str, tuple[str, str]]
"""The name of a stack to the prefix of its layer's experts and the parameter's name in an expert."""


def stacks_of(model: nn.Module) -> dict[str, tuple[str, str]]:
    """The stacks of experts in a model."""
    found = {}
    for where, module in model.named_modules():
        if isinstance(module, ExpertModules):
            prefix = f"{where}." if where else ""
            found.update({f"{prefix}{key}": (prefix, name) for key, name in module.stack_names.items()})
    return found


def as_listed(tensors: Iterable[tuple[str, Any]], stacks: Stacks) -> Iterator[tuple[str, Any]]:
    """Names and whole tensors of a state, experts under the names that DeepSpeed gives them in one process."""
    for key, value in tensors:
        if key not in stacks:
            yield key, value
            continue
        prefix, name = stacks[key]
        yield from ((f"{prefix}{_LIST}.{number}.{name}", one) for number, one in enumerate(value))


def as_stacked(state: Mapping[str, Any], stacks: Stacks) -> dict[str, Any]:
    """A whole state with stacks of experts where it has them one by one."""
    found = dict(state)
    for key, (prefix, name) in stacks.items():
        parts = _taken(found, prefix, name)
        if parts:
            found[key] = torch.stack(parts)
    return found


def _taken(state: dict[str, Any], prefix: str, name: str) -> list[Tensor]:
    """The tensors of one parameter of all experts, in order, taken out of a state."""
    parts: list[Tensor] = []
    while f"{prefix}{_LIST}.{len(parts)}.{name}" in state:
        parts.append(state.pop(f"{prefix}{_LIST}.{len(parts)}.{name}"))
    return parts


def _attribute(name: str) -> str:
    return name.replace(".", "__")
