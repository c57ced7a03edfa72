"""Python objects as bytes and back, without pickle: what another rank sends is data, and decoding it runs no code.

Plain values and tensors travel as `comm.serialization` has them. On top of that: numpy arrays and scalars, the usual
containers and small types of the standard library and of torch, argparse namespaces, and the script's own named tuples,
enums and dataclasses. Of those the name travels; the receiver looks it up among the modules it has imported, and fills
in the fields without calling the class. Instances of other classes travel only if the script allows the class.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import pathlib
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import SerializationError
from torsh_distributed.migrate.horovod.collectives.async_calls import allgather_async, broadcast_async_
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set
from torsh_distributed.migrate.horovod.world_state import world

C = TypeVar("C", bound=type)

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_allowed: dict[str, type] = {}
"""Classes whose instances travel with their attributes, by full name."""


def allow_objects(kind: C) -> C:
    """Let instances of a class of the script travel between ranks: `allow_objects(Config)`, or as a decorator.

    Its attributes travel, and its `__setstate__`, if it has one, is called on the other ranks. Every rank calls this.
    """
    _allowed[_name_of(kind)] = kind
    return kind


def encode_object(value: Any, tensors: list[Tensor] | None = None) -> bytes:
    """An object as bytes. Tensors are part of them, unless they are collected in `tensors`, as they are.

    Raises SerializationError naming the part that cannot be sent.
    """
    try:
        return serialize(_encoded(value, "the object", tensors))
    except RecursionError as error:
        raise SerializationError("the object contains itself, or is nested too deeply") from error


def decode_object(data: bytes, tensors: list[Tensor] | None = None) -> Any:
    """The object in bytes that `encode_object` made; raises SerializationError for anything else."""
    try:
        return _decoded(deserialize(data), tensors)
    except SerializationError:
        raise
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise SerializationError(
            "the bytes are not an object that a rank of this version sent", reason=f"{type(error).__name__}: {error}"
        ) from error


# --- encoding: a container is [tag, …], everything else stands for itself -------------------------------------------


def _encoded(value: Any, path: str, tensors: list[Tensor] | None) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor) and kind in (Tensor, torch.nn.Parameter):
        return _encoded_tensor(value, tensors)
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], _parts(value, path, tensors)]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], _pairs(value, path, tensors)]
    if kind in _NAMESPACES:
        return [_NAMESPACES[kind], _pairs(vars(value), path, tensors)]
    if kind is collections.OrderedDict:  # those of state_dict() have attributes
        return ["ordered", _pairs(value, path, tensors), _pairs(vars(value), path, tensors)]
    if kind is collections.deque:
        return ["deque", _parts(value, path, tensors), value.maxlen]
    if kind is collections.defaultdict and value.default_factory in _FACTORIES:
        return ["default", _pairs(value, path, tensors), value.default_factory.__name__]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        array = np.asarray(value)
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return [tag, array.dtype.str, list(array.shape), array.tobytes()]
    if isinstance(value, enum.Enum):
        return ["enum", _name_of(kind), value.name]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["fields", _name_of(kind), _parts(value, path, tensors)]
    for tag, (simple, to_text, _) in _BY_TEXT.items():
        if isinstance(value, simple):
            return [tag, to_text(value)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["dataclass", _name_of(kind), _pairs(fields, path, tensors)]
    if _allowed.get(_name_of(kind)) is kind:
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
        return ["object", _name_of(kind), _encoded(state, f"{path}.__dict__", tensors)]
    raise SerializationError(
        f"{path} cannot be sent to other ranks: it is a {_name_of(kind)}",
        hint="send plain values, tensors, numpy arrays, dataclasses; or call "
        "torsh_distributed.migrate.horovod.allow_objects(…) with the class on every rank",
        type=_name_of(kind),
    )


def _encoded_tensor(value: Tensor, tensors: list[Tensor] | None) -> Any:
    if tensors is None:
        return ["tensor", value.detach(), value.requires_grad, isinstance(value, torch.nn.Parameter)]
    tensors.append(value.detach())
    return ["tensor", len(tensors) - 1, value.requires_grad, isinstance(value, torch.nn.Parameter)]


def _parts(values: Iterable[Any], path: str, tensors: list[Tensor] | None) -> list[Any]:
    return [_encoded(part, f"{path}[{index}]", tensors) for index, part in enumerate(values)]


def _pairs(value: Any, path: str, tensors: list[Tensor] | None) -> list[Any]:
    return [
        [_encoded(key, f"{path} key", tensors), _encoded(part, f"{path}[{key!r}]", tensors)]
        for key, part in value.items()
    ]


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{text} is not a dtype")
    return dtype


_SEQUENCES: dict[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: dict[type, str] = {dict: "dict", collections.Counter: "counter"}
_NAMESPACES: dict[type, str] = {argparse.Namespace: "namespace", types.SimpleNamespace: "record"}
_FACTORIES: tuple[type, ...] = (int, float, list, dict, set, str, bool)
_BY_TEXT: dict[str, tuple[type | tuple[type, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "range": (range, lambda one: [one.start, one.stop, one.step], lambda parts: range(*parts)),
    "slice": (slice, lambda one: [one.start, one.stop, one.step], lambda parts: slice(*parts)),
    "dtype": (torch.dtype, lambda one: str(one).removeprefix("torch."), _dtype),
    "device": (torch.device, str, torch.device),
    "path": (pathlib.PurePath, str, pathlib.Path),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda one: [one.days, one.seconds, one.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    "bytearray": (bytearray, bytes, bytearray),
}
"""Small types: how they become plain values, and back."""


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# --- decoding -------------------------------------------------------------------------------------------------------


def _decoded(value: Any, tensors: list[Tensor] | None) -> Any:
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag in _OF_SEQUENCE:
        return _OF_SEQUENCE[tag]([_decoded(part, tensors) for part in parts[0]])
    if tag in _OF_PAIRS:
        return _OF_PAIRS[tag](_decoded_pairs(parts[0], tensors))
    if tag in _BY_TEXT:
        return _BY_TEXT[tag][2](parts[0])
    if tag == "tensor":
        held, requires_grad, is_param = parts
        return _decoded_tensor(held, requires_grad, is_param, tensors)
    if tag in ("array", "scalar"):
        dtype, shape, data = parts
        array = np.frombuffer(bytearray(data), dtype=np.dtype(dtype)).reshape(shape)
        return array if tag == "array" else array[()]
    if tag == "ordered":
        ordered = collections.OrderedDict(_decoded_pairs(parts[0], tensors))
        vars(ordered).update(_decoded_pairs(parts[1], tensors))
        return ordered
    if tag == "deque":
        return collections.deque([_decoded(part, tensors) for part in parts[0]], parts[1])
    if tag == "default":
        factory = {kind.__name__: kind for kind in _FACTORIES}[parts[1]]
        return collections.defaultdict(factory, _decoded_pairs(parts[0], tensors))
    name, held = parts
    return _of_class(tag, name, held, tensors)


def _of_class(tag: str, name: str, held: Any, tensors: list[Tensor] | None) -> Any:
    if tag == "enum":
        return _found(name, enum.Enum).__members__[held]  # type: ignore[attr-defined]  # an enum has it
    if tag == "fields":
        return tuple.__new__(_found(name, tuple), [_decoded(part, tensors) for part in held])
    if tag == "dataclass":
        return _filled_dataclass(name, _decoded_pairs(held, tensors))
    if tag == "object":
        return _allowed_object(name, _decoded(held, tensors))
    raise ValueError(f"unknown kind {tag!r}")


def _decoded_pairs(pairs: list[Any], tensors: list[Tensor] | None) -> dict[Any, Any]:
    return {_decoded(key, tensors): _decoded(part, tensors) for key, part in pairs}


_OF_SEQUENCE: dict[Any, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_OF_PAIRS: dict[Any, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "counter": collections.Counter,
    "namespace": lambda pairs: argparse.Namespace(**pairs),
    "record": lambda pairs: types.SimpleNamespace(**pairs),
}


def _decoded_tensor(held: Any, requires_grad: bool, is_param: bool, tensors: list[Tensor] | None) -> Tensor:
    tensor = held if tensors is None else tensors[held]
    if not isinstance(tensor, Tensor):
        raise TypeError("a tensor is missing")
    if is_param:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _found(name: str, base: type) -> type:
    """A class by name, among the modules that are imported already.

    Nothing is imported and no code runs for a message: attributes are looked up in `__dict__`, and classes that do
    something when their instances go away are not built.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | types.ModuleType) else None
    if not isinstance(found, type) or not issubclass(found, base) or hasattr(found, "__del__"):
        raise SerializationError(
            f"another rank sent a {name}, which this rank does not have",
            hint="import the module that defines it on every rank, at the top level of the module",
        )
    return found


def _filled_dataclass(name: str, values: dict[str, Any]) -> Any:
    kind: Any = _found(name, object)
    if not dataclasses.is_dataclass(kind) or {field.name for field in dataclasses.fields(kind)} != values.keys():
        raise SerializationError(f"another rank sent a {name}, which has other fields here", fields=sorted(values))
    filled: Any = object.__new__(_found(name, object))
    for key, value in values.items():
        object.__setattr__(filled, key, value)
    return filled


def _allowed_object(name: str, state: Any) -> Any:
    kind = _allowed.get(name)
    if kind is None:
        raise SerializationError(
            f"another rank sent a {name}, which this rank does not allow",
            hint="call torsh_distributed.migrate.horovod.allow_objects(…) with the class on every rank",
        )
    made: Any = object.__new__(kind)
    if hasattr(kind, "__setstate__"):
        made.__setstate__(state)
    else:
        vars(made).update(state or {})
    return made


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of `root_rank` on every rank; on the others `obj` is not used.

    Raises SerializationError, on every rank, for an object that cannot be sent.
    """
    label = name if name is not None else "object"
    is_root = world().rank == root_rank
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(size, root_rank, f"{label}.sz", process_set))
    buffer = data if is_root else torch.empty(int(size), dtype=torch.uint8)
    synchronize(broadcast_async_(buffer, root_rank, f"{label}.t", process_set))
    return obj if is_root and int(buffer[0]) == _OBJECT else _unpacked(buffer, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, by rank. Raises SerializationError, on every rank, if one of them cannot be sent."""
    label = name if name is not None else "objects"
    data = _packed(obj)
    sizes = synchronize(allgather_async(torch.tensor([data.numel()]), f"{label}.sz", process_set)).tolist()
    gathered = synchronize(allgather_async(data, f"{label}.t", process_set))
    return [_unpacked(part, rank) for rank, part in enumerate(torch.split(gathered, sizes))]


_OBJECT, _REFUSAL = 0, 1


def _packed(obj: Any) -> Tensor:
    """An object as bytes, or why it cannot be sent: the other ranks wait for one of the two."""
    try:
        data = bytes([_OBJECT]) + encode_object(obj)
    except SerializationError as error:
        data = bytes([_REFUSAL]) + f"{error.message}\0{error.hint or ''}".encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(data: Tensor, rank: int) -> Any:
    packed = data.numpy().tobytes()
    if packed[:1] == bytes([_REFUSAL]):
        message, _, hint = packed[1:].decode(errors="replace").partition("\0")
        raise SerializationError(f"rank {rank}: {message}", hint=hint or None, rank=rank)
    return decode_object(packed[1:])
