"""How the parts of a state are saved, restored and made equal on all ranks, by the type of the part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.migrate.horovod.collectives.object_encoding import allgather_object, broadcast_object
from torsh_distributed.migrate.horovod.elastic.elastic_sampler import ElasticSampler
from torsh_distributed.migrate.horovod.state_broadcast import (
    broadcast_optimizer_state,
    broadcast_parameters,
)


class StateHandler:
    """Keeps one part of a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the part as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Bring the part back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the part equal on all ranks; every rank calls this."""
        raise NotImplementedError

    def agree(self) -> None:
        """Tell the other ranks what only this one knows; every rank calls this. Nothing by default."""

    def set_value(self, value: Any) -> None:
        """Handle another object from now on."""
        self.value = value
        self.save()

    def saved(self) -> Any:
        """The copy, for a file."""
        raise NotImplementedError

    def load(self, saved: Any) -> None:
        """Take a copy from a file, and bring the part to it."""
        raise NotImplementedError


class _DictHandler(StateHandler):
    """For objects with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = copy.deepcopy(value.state_dict())

    @override
    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    @override
    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    @override
    def saved(self) -> Any:
        return self._saved

    @override
    def load(self, saved: Any) -> None:
        self._saved = saved
        self.restore()


class ModelStateHandler(_DictHandler):
    """A model: rank 0's parameters and buffers for all."""

    @override
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_DictHandler):
    """An optimizer: rank 0's state for all."""

    @override
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_DictHandler):
    """A sampler: what any rank has processed counts as processed."""

    @override
    def agree(self) -> None:
        if self.value.exactly_once:
            self.value.merge(allgather_object(self.value.news(), "sampler.news"))

    @override
    def sync(self) -> None:
        if self.value.exactly_once:
            states = allgather_object(self.value.state_dict(), "sampler")
            newest = max(state["epoch"] for state in states)
            done = {
                index for state in states if state["epoch"] == newest for index in state.get("processed_indices", ())
            }
            merged = {"epoch": newest, "processed_num": len(done), "processed_indices": sorted(done)}
        else:
            merged = broadcast_object(self.value.state_dict(), 0, "sampler")
        self.value.load_state_dict(merged)
        self.save()


class ObjectStateHandler(_DictHandler):
    """Anything else with `state_dict` and `load_state_dict`, such as a schedule: rank 0's state for all."""

    @override
    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0, "object.state"))
        self.save()


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


Registry = list[tuple[type[Any] | Callable[[Any], bool], type[StateHandler]]]

_registry: Registry = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (_has_state, ObjectStateHandler),
]


def get_handler_registry() -> Registry:
    """Types, or functions that recognise a value, and the handlers for them; the first that fits is used."""
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Replace the table: for parts of other types."""
    global _registry
    _registry = list(registry)


def handler_for(value: Any) -> StateHandler | None:
    """The handler of a value; None for a plain object."""
    for kind, handler in _registry:
        fits = isinstance(value, kind) if isinstance(kind, type) else kind(value)
        if fits:
            return handler(value)
    return None
