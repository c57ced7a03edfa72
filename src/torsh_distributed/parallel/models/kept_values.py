"""What code keeps between calls apart from modules' own state: a count around a loss, a list that it fills.

A forward or a loss that only looks must leave these as they were: a coefficient that grows with each call would start
higher than in one process. Libraries are not searched, nor is what no function names.
"""

from __future__ import annotations

import dis
import functools
import operator
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, deque, dict, set)
_MOST = 1000
"""Values that are followed, so that a large object costs no more than a look."""
_MOST_ENTRIES = 64
"""A longer list is data: its entries are not followed."""
_MOST_BYTES = 2**24
"""A larger tensor is no statistic, and would take long to copy."""
_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *("<frozen", __file__.rpartition("/parallel/")[0]),  # ours may be installed from a checkout
)


@dataclass(frozen=True)
class KeptValue:
    """A value, and the variable that has it; a list, dict or tensor is one of its own besides."""

    name: str
    value: Any
    owner: CellType | dict[Any, Any] | list[Any] | deque[Any] | None = None
    """None: `value` is changed in place."""
    key: Any = None


class KeptValues:
    """What `roots`, functions, objects or modules, keep between calls, to put back."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self._variables: list[KeptValue] = []
        self._contents: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        for one in kept_values(roots):
            if one.owner is not None:
                self._variables.append(one)
            elif isinstance(one.value, Tensor):
                self._tensors.append((one.value, one.value.data.clone()))
            else:
                self._contents.append((one.value, _entries(one.value)))

    def restore(self) -> None:
        """Give every variable its value and every list its entries again."""
        for held, entries in self._contents:
            if len(held) != len(entries) or not all(map(operator.is_, _flat(_entries(held)), _flat(entries))):
                held.clear()
                held.update(entries) if isinstance(held, dict | set) else held.extend(entries)
        for one in self._variables:
            if isinstance(one.owner, CellType):
                one.owner.cell_contents = one.value
            elif one.owner is not None:
                one.owner[one.key] = one.value
        for tensor, before in self._tensors:
            tensor.data.copy_(before)


def kept_values(roots: Iterable[Any]) -> Iterator[KeptValue]:
    """Variables that functions write, attributes of objects, and what lists, dicts and tensors in them hold."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque(("", root) for root in roots)
    while waiting and len(seen) < _MOST:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_changeable(value):
            yield KeptValue(name, value)
        for one in _inside(name, value):
            if one.owner is not None:
                yield one
            waiting.append((one.name, one.value))


def _entries(held: Any) -> list[Any]:
    return list(held.items()) if isinstance(held, dict) else list(held)


def _flat(entries: list[Any]) -> Iterator[Any]:
    """Entries, those of a dict as keys and values: its pairs are made for each look."""
    for one in entries:
        yield from one if type(one) is tuple else (one,)


def roots_of(module: nn.Module) -> Iterator[Any]:
    """The code of the user's modules that a forward runs: forwards and hooks."""
    for one in module.modules():
        yield vars(one).get("forward", type(one).forward)
        yield from one._forward_hooks.values()
        yield from one._forward_pre_hooks.values()


def _is_changeable(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and not value.requires_grad and not value.is_meta
        return is_plain and value.numel() * value.element_size() <= _MOST_BYTES
    return isinstance(value, _CONTAINERS)


def _inside(name: str, value: Any) -> Iterator[KeptValue]:
    """What to follow in `value`; with an owner, what it may have bound to something else later."""
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (KeptValue(name, one) for one in (value.__self__, value.__func__))
    elif isinstance(value, functools.partial):
        yield from (KeptValue(name, one) for one in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, (*_CONTAINERS, tuple)) and len(value) <= _MOST_ENTRIES:
        owner = None if isinstance(value, set | tuple) else value
        for key, one in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield KeptValue(f"{name}[{key!r}]", one, owner, key)
    elif _is_users(value):
        prefix = f"{name}." if name else ""
        yield from (KeptValue(f"{prefix}{key}", one, vars(value), key) for key, one in vars(value).items())
        yield KeptValue(name, vars(type(value)).get("__call__"))


def _of_function(function: FunctionType) -> Iterator[KeptValue]:
    if _is_library(function.__code__):
        return
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield KeptValue(key, cell.cell_contents, cell)
        except ValueError:  # it has no value yet
            continue
    for key, value in vars(function).items():
        yield KeptValue(key, value, vars(function), key)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield KeptValue(function.__name__, value)
    read, written = _globals_of(function.__code__)
    for key in read:
        if key in function.__globals__:
            owner = function.__globals__ if key in written else None
            yield KeptValue(key, function.__globals__[key], owner, key)


@functools.lru_cache(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of globals that code mentions, and those that it assigns."""
    names, written = dict.fromkeys(code.co_names), set[str]()
    written.update(one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            read, assigned = _globals_of(inner)
            names.update(dict.fromkeys(read))
            written |= assigned
    return tuple(names), frozenset(written)


def _is_users(value: Any) -> bool:
    """Whether this is an object of a class that the user wrote. Modules keep their state by rules of their own."""
    if isinstance(value, type | nn.Module) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    codes = [one.__code__ for one in vars(type(value)).values() if isinstance(one, FunctionType)]
    return bool(codes) and not any(map(_is_library, codes))


def _is_library(code: CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARIES)
