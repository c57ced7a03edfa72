"""The parameters of one server with any optimizer of torch: tensors as a whole, and tables of which rows are used.

Everything is in kept tensors: parameters as `p/NAME`, what the optimizer keeps for them as `s/KEY/NAME`. The plain
values of an optimizer (`step` of some) are among the values of the record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.rpc.parameters.kept_tensors import Change, KeptTensors
from torsh_distributed.rpc.serving.exposed import TABLE, sendable

RowGradients = tuple[Tensor, Tensor]
"""Which rows (int64), and the gradient of each (num_rows, dim)."""


@sendable
@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """A parameter of which few rows are used at a time, such as an embedding; its servers make it themselves.

    Rows begin as normal numbers with this deviation, from the seed, the name and the number of servers.
    """

    num_rows: int
    dim: int
    std: float = 0.01
    seed: int = 0


@dataclass
class Gradients:
    """What one push brings, or several brought together."""

    whole: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, RowGradients] = field(default_factory=dict)


def mean_of(pushes: list[tuple[Gradients, float]]) -> Gradients:
    """The mean by weight, added up in this order; who has no gradient for a parameter adds nothing to it.

    The first gradient's memory takes the sum: that of a new tensor would be new pages at every step.
    """
    total_weight = sum(weight for _, weight in pushes)
    mean = Gradients()
    for gradients, weight in pushes:
        for name, gradient in gradients.whole.items():
            if name in mean.whole:
                mean.whole[name].add_(gradient, alpha=weight)
            elif weight == 1 and gradient.is_floating_point():
                mean.whole[name] = gradient  # as it is: a pass over all of it takes as long as adding another one
            else:
                mean.whole[name] = gradient.mul_(weight) if gradient.is_floating_point() else gradient * weight
        for name, (rows, gradient) in gradients.rows.items():
            before = mean.rows.get(name, (rows[:0], gradient[:0]))
            share = gradient * (weight / total_weight)
            mean.rows[name] = (torch.cat([before[0], rows]), torch.cat([before[1], share]))
    for gradient in mean.whole.values():
        gradient.div_(total_weight)
    return mean


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of torch by its name, or one that the server exposes as `module:Class`."""
    found = TABLE.function(name) if ":" in name else getattr(torch.optim, name, None)
    if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
        raise InvalidArgument(
            f"{name!r} is not an optimizer that the server knows",
            hint="a name in torch.optim such as AdamW, or module:Class of one with @rpc.expose that the server imports",
            optimizer=name,
        )
    return found


class ParameterShard:
    """Applies gradients. One thread at a time; what is applied is kept with the next `commit` of the tensors."""

    def __init__(self, kept: KeptTensors, optimizer: str, options: Mapping[str, Any], tables: list[str]) -> None:
        """With the parameters, and what the optimizer had kept for them, that are there."""
        self._kept = kept
        self._table_names = tables
        self._make = functools.partial(optimizer_class(optimizer), **_as_torch(options))
        self._tables: dict[str, RowOptimizer] = {}
        self._params: dict[str, nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._load()

    def _load(self) -> None:
        self._params = {
            name[2:]: nn.Parameter(self._kept[name], requires_grad=self._kept[name].is_floating_point())
            for name in self._kept.names("p/")
        }
        self._tables = {name: RowOptimizer(self._make, self._kept, name) for name in self._table_names}
        whole = {name: param for name, param in self._params.items() if name not in self._tables}
        self._optimizer = self._make(list(whole.values())) if whole else None
        plain = self._kept.values.get("plain", {})
        for name, param in whole.items():
            assert self._optimizer is not None, "there is a parameter"
            state = self._optimizer.state[param]
            state.update(plain.get(name, {}))
            state.update(
                {key: self._kept[f"s/{key}/{name}"] for key in self._kept.values.get("keys", {}).get(name, ())}
            )
            if not state:
                del self._optimizer.state[param]

    @property
    def names(self) -> list[str]:
        """Of the parameters that are pulled as a whole."""
        return [name for name in self._params if name not in self._tables]

    def tensor(self, name: str) -> Tensor:
        """A parameter's own memory."""
        if name not in self._params:
            raise InvalidArgument(
                "the server has no parameter of this name", name=name, parameters=", ".join(self._params)[:500]
            )
        return self._kept[f"p/{name}"]

    def check(self, gradients: Gradients) -> None:
        """Whether these are gradients of the parameters here, before anybody waits for them."""
        for name, gradient in gradients.whole.items():
            if name in self._tables or gradient.shape != self.tensor(name).shape:
                raise TensorShapeMismatch(
                    "a gradient does not have its parameter's shape",
                    hint="a table takes rows: push_rows" if name in self._tables else None,
                    name=name,
                    gradient=tuple(gradient.shape),
                    parameter=tuple(self.tensor(name).shape),
                )
        for name, (rows, gradient) in gradients.rows.items():
            self.check_rows(name, rows)
            table = self.tensor(name)
            if gradient.shape != (*rows.shape, table.shape[1]):
                raise TensorShapeMismatch(
                    "every row that is pushed has one gradient",
                    name=name,
                    rows=tuple(rows.shape),
                    gradient=tuple(gradient.shape),
                    table=tuple(table.shape),
                )

    def check_rows(self, name: str, rows: Tensor) -> None:
        """Whether these are rows of a table here."""
        table = self.tensor(name)
        is_right = name in self._tables and rows.dtype == torch.int64 and rows.dim() == 1
        if not is_right or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]):
            raise TensorShapeMismatch(
                "rows of a table are int64 numbers within it, with one gradient each",
                name=name,
                is_table=name in self._tables,
                rows=tuple(rows.shape),
                dtype=str(rows.dtype),
                table=tuple(table.shape),
            )

    def state(self) -> dict[str, dict[str, Any]]:
        """A copy of what the optimizer keeps for each parameter that is pulled as a whole."""
        plain, keys = self._kept.values.get("plain", {}), self._kept.values.get("keys", {})
        return {
            name: {**plain.get(name, {}), **{key: self._kept[f"s/{key}/{name}"].clone() for key in keys.get(name, ())}}
            for name in self.names
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Any]], **values: Any) -> None:
        """Go on from these parameters and this state, kept together with the values; what is not named stays."""
        self.check(Gradients(whole=dict(tensors)))
        plain, keys = dict(self._kept.values.get("plain", {})), dict(self._kept.values.get("keys", {}))
        try:
            with self._kept.changing([(f"p/{name}", None) for name in tensors]):
                for name, tensor in tensors.items():
                    self.tensor(name).copy_(tensor)
                for name, found in state.items():
                    self.tensor(name)
                    kept = {key: value for key, value in found.items() if isinstance(value, Tensor)}
                    for key, value in kept.items():
                        self._kept.add(f"s/{key}/{name}", value.shape, value.dtype).copy_(value)
                    keys[name], plain[name] = list(kept), {key: one for key, one in found.items() if key not in kept}
                self._kept.commit(**values, plain=plain, keys=keys)
        finally:
            self._load()

    def apply(self, gradients: Gradients, **values: Any) -> None:
        """One step of the optimizer, kept together with these values. As before if the optimizer raises."""
        rows = {name: summed(*pushed) for name, pushed in gradients.rows.items()}
        changes = [change for name in gradients.whole for change in self._of_whole(name)]
        changes += [change for name, (indices, _) in rows.items() for change in self._tables[name].changes(indices)]
        try:
            with self._kept.changing(changes):
                self._step_whole(gradients.whole)
                for name, (indices, gradient) in rows.items():
                    self._tables[name].step(indices, gradient)
                self._kept.commit(**values, **self._adopt(gradients.whole))
        except Exception:
            self._load()
            raise

    def _of_whole(self, name: str) -> list[Change]:
        keys = self._kept.values.get("keys", {}).get(name, ())
        return [(f"p/{name}", None), *((f"s/{key}/{name}", None) for key in keys)]

    def _step_whole(self, gradients: Mapping[str, Tensor]) -> None:
        if self._optimizer is None or not gradients:
            return
        for name, gradient in gradients.items():
            self._params[name].grad = gradient.to(self._params[name].dtype)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _adopt(self, names: Mapping[str, Tensor]) -> dict[str, Any]:
        """Move what the optimizer made in this step to kept memory; returns what it keeps as plain values."""
        plain, keys = dict(self._kept.values.get("plain", {})), dict(self._kept.values.get("keys", {}))
        for name in names:
            assert self._optimizer is not None, "it has made a step"
            state = self._optimizer.state.get(self._params[name], {})
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key, value in tensors.items():
                place = f"s/{key}/{name}"
                if place not in self._kept or self._kept[place].shape != value.shape:
                    self._kept.add(place, value.shape, value.dtype)
                if self._kept[place].data_ptr() != value.data_ptr():
                    self._kept[place].copy_(value)
                    state[key] = self._kept[place]
            keys[name] = list(tensors)
            plain[name] = {key: value for key, value in state.items() if key not in tensors}
        return {"plain": plain, "keys": keys}


class RowOptimizer:
    """An optimizer's step for rows of a table: each row keeps its own state, `step` counts for the whole table.

    Rows that are not pushed do not change. For optimizers that treat every element alike.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], kept: KeptTensors, name: str) -> None:
        self._make = make
        self._kept = kept
        self._name = name
        self._state = row_state(make)
        for key, value in self._state.items():
            if f"s/{key}/{name}" not in kept:
                table = kept[f"p/{name}"]
                kept.add(f"s/{key}/{name}", table.shape if value.dim() == 2 else (), value.dtype)
                if value.dim() == 2 and float(value[0, 0]):
                    kept[f"s/{key}/{name}"].fill_(float(value[0, 0]))

    def changes(self, rows: Tensor) -> list[Change]:
        """What a step for these rows changes."""
        state = [(f"s/{key}/{self._name}", rows if value.dim() == 2 else None) for key, value in self._state.items()]
        return [(f"p/{self._name}", rows), *state]

    def step(self, rows: Tensor, gradient: Tensor) -> None:
        """Each row at most once."""
        table = self._kept[f"p/{self._name}"]
        param = nn.Parameter(table.index_select(0, rows))
        param.grad = gradient.to(table.dtype)
        state = {key: self._kept[f"s/{key}/{self._name}"] for key in self._state}
        optimizer = self._make([param])
        optimizer.state[param].update(
            {key: value.index_select(0, rows) if value.dim() == 2 else value.clone() for key, value in state.items()}
        )
        optimizer.step()
        table.index_copy_(0, rows, param.detach())
        for key, value in state.items():
            if value.dim() == 2:
                value.index_copy_(0, rows, optimizer.state[param][key])
            else:
                value.copy_(optimizer.state[param][key])


def row_state(make: Callable[..., torch.optim.Optimizer]) -> dict[str, Tensor]:
    """What an optimizer keeps for rows that had no gradient yet: tensors of two dimensions, and `step`.

    InvalidArgument if its first step is not the one that begins with this state: then rows cannot be kept apart.
    """
    try:
        state, is_same = _probed(make)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise _cannot_do_rows(make, str(error)) from error
    if not is_same:
        raise _cannot_do_rows(make, "its first step differs from later ones")
    return state


def _probed(make: Callable[..., torch.optim.Optimizer]) -> tuple[dict[str, Tensor], bool]:
    """The state after a step with no gradient, and whether beginning with it is the same as beginning without."""
    idle, fresh, begun = (nn.Parameter(torch.zeros(1, 3)) for _ in range(3))
    first = make([idle])
    idle.grad = torch.zeros(1, 3)
    first.step()
    state = {
        key: torch.zeros((), dtype=value.dtype) if key == "step" else value.clone()
        for key, value in first.state[idle].items()
    }
    starts: list[tuple[nn.Parameter, dict[str, Tensor]]] = [(fresh, {}), (begun, state)]
    for param, known in starts:
        optimizer = make([param])
        optimizer.state[param].update({key: value.clone() for key, value in known.items()})
        for factor in (1.0, -0.5):
            param.grad = torch.tensor([[0.5, -2.0, 3.0]]) * factor
            optimizer.step()
    has_rows = all(value.dim() == 2 for key, value in state.items() if key != "step")
    return state, has_rows and torch.equal(fresh, begun)


def _cannot_do_rows(make: Callable[..., torch.optim.Optimizer], reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"this optimizer cannot update single rows of a table: {reason}",
        hint="use one that treats elements alike: SGD, Adagrad, RMSprop, Adam, AdamW",
        optimizer=getattr(getattr(make, "func", make), "__name__", str(make)),
    )


def summed(rows: Tensor, gradient: Tensor) -> RowGradients:
    """Each row once, with the sum of its gradients in the order in which they come."""
    in_order = rows.sort().values
    if not bool((in_order[1:] == in_order[:-1]).any()):
        return rows, gradient
    unique, place = torch.unique(rows, return_inverse=True)
    return unique, gradient.new_zeros((unique.numel(), *gradient.shape[1:])).index_add_(0, place, gradient)


def _as_torch(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as they are for torch, which wants `betas` as a tuple; lists come from the record."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
