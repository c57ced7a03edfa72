"""The experts of a rank: feed-forward networks with stacked weights, so one product computes them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.expert.grouped import ExpertSegment, NewRows, ends_of, grouped_linear, segmented_linear
from torsh_distributed.plan.sections.expert import ExpertConfig

Activation = Literal["relu", "gelu", "silu", "tanh", "swiglu"]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "swiglu": lambda pair: functional.silu(pair.chunk(2, dim=-1)[0]) * pair.chunk(2, dim=-1)[1],
}


class Experts(nn.Module):
    """Two linear layers with an activation between them, for each expert on this rank.

    `up` (experts, input, hidden), twice as wide for swiglu; `down` (experts, hidden, output). Every rank draws all
    experts and drops the others', so an expert's initial weights do not depend on its rank.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: int,
        output_dim: int,
        config: ExpertConfig,
        *,
        here: Sequence[int],
        activation: Activation = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise InvalidArgument(
                f"unknown activation {activation!r}", hint=f"choose one of {', '.join(get_args(Activation))}"
            )
        self.config = config
        self.activation = activation
        wide = 2 * hidden_dim if activation == "swiglu" else hidden_dim
        place: dict[str, torch.device | str | torch.dtype | None] = {"device": device, "dtype": dtype}
        self.up = nn.Parameter(torch.empty((len(here), input_dim, wide), **place))  # type: ignore[arg-type]
        self.down = nn.Parameter(torch.empty((len(here), hidden_dim, output_dim), **place))  # type: ignore[arg-type]
        self.up_bias = self.down_bias = None
        if bias:
            self.up_bias = nn.Parameter(torch.empty((len(here), wide), **place))  # type: ignore[arg-type]
            self.down_bias = nn.Parameter(torch.empty((len(here), output_dim), **place))  # type: ignore[arg-type]
        self.here = tuple(here)
        """The experts on this rank, in stack order."""
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise weights as `config.initialization` says; biases are 0."""
        for weight in (self.up, self.down):
            _draw(weight, self.config, self.here)
        for bias in (self.up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def keep(self, here: Sequence[int]) -> None:
        """Keep only these experts, all of which are here; parameters stay the same objects."""
        places = [self.here.index(expert) for expert in here]
        for param in self.stacked().values():
            param.data = param.data[places].clone()
            param.grad = None
        self.here = tuple(here)

    @property
    def num_local(self) -> int:
        """How many experts are on this rank."""
        return self.up.shape[0]

    def stacked(self) -> dict[str, nn.Parameter]:
        """The parameters with one entry for each expert: all of them."""
        return dict(self.named_parameters())

    @override
    def forward(
        self,
        rows: Tensor,
        where: tuple[ExpertSegment, ...] | Tensor,
        weights: Mapping[str, Tensor] | None = None,
        new_rows: NewRows | None = None,
    ) -> Tensor:
        """(rows, output): the experts' outputs for their rows.

        where: the segments of `rows`; or, for rows sorted by expert, (experts,) the number of rows of each, on the
        device of the rows: then it is one kernel, and the host need not know the numbers.
        weights: stacks to compute with, by parameter name; default: this rank's own.
        new_rows: allocates the output; default: a new tensor.
        """
        up, up_bias, down, down_bias = _cast(weights or self.stacked(), rows.dtype)
        if isinstance(where, Tensor):
            ends = ends_of(where)
            hidden = self._activate(grouped_linear(rows, up, up_bias, where, ends))
            return grouped_linear(hidden, down, down_bias, where, ends)
        hidden = self._activate(segmented_linear(rows, up, up_bias, where))
        return segmented_linear(hidden, down, down_bias, where, new_rows)

    def _activate(self, hidden: Tensor) -> Tensor:
        active = _ACTIVATIONS[self.activation](hidden)
        return functional.dropout(active, self.config.dropout, training=self.training)

    @override
    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name} {tuple(param.shape)}" for name, param in self.stacked().items())
        return f"{shapes}, activation={self.activation}"


def _cast(stacks: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """up, up_bias, down and down_bias, in `dtype`."""
    given = {name: stack.to(dtype) for name, stack in stacks.items()}
    return given["up"], given.get("up_bias"), given["down"], given.get("down_bias")


def _draw(weight: Tensor, config: ExpertConfig, here: Sequence[int]) -> None:
    """Fill a stack (experts, in, out) as `config.initialization` says, one expert of the whole layer after another."""
    places = {expert: place for place, expert in enumerate(here)}
    fan_in, fan_out = weight.shape[1:]
    scratch = torch.empty_like(weight[0])
    for expert in range(config.num_experts):
        # Also draw experts of other ranks: this keeps the generator in the same state on every rank.
        target = weight[places[expert]] if expert in places else scratch
        if config.initialization == "xavier":
            nn.init.xavier_uniform_(target)
        elif config.initialization == "kaiming":
            target.normal_(0, math.sqrt(2 / fan_in))
        elif config.initialization == "normal":
            target.normal_(0, 0.02)
        elif config.initialization == "uniform":
            bound = 1 / math.sqrt(fan_in)
            target.uniform_(-bound, bound)
        else:
            nn.init.trunc_normal_(target, std=math.sqrt(2 / (fan_in + fan_out)), a=-2, b=2)
