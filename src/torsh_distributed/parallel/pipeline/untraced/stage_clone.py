"""A stage that runs the model's own forward, with stand-ins for the layers and embeddings of other stages.

Masks, tables of positions and other things that a forward computes from the batch are computed again in every stage, by
the model's own code. The hidden state is the only thing that stages send. Layers keep their places in their list, so a
layer that is told apart by its number (sliding and global attention) stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, InvalidArgument, first_line
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.pipeline.microbatches import Microbatches
from torsh_distributed.parallel.pipeline.untraced.layer_chain import LayerChain
from torsh_distributed.parallel.torch_internals import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


class UntracedStage(nn.Module):
    """A stage of a model: takes the hidden state of the stage before, returns its own, or the model's output.

    Its parameters have their names in the model; the modules are the model's. The other inputs of the forward come from
    the microbatch that is current.
    """

    def __init__(
        self, model: nn.Module, chain: LayerChain, layers: Sequence[str], owned: Sequence[str], feed: Microbatches
    ) -> None:
        super().__init__()
        for name in owned:
            _place(self, name, model)
        self._feed = feed
        self.forward_of_model = _StageForward(model, chain, layers)

    @override
    def forward(self, *received: Tensor) -> Any:
        return self.forward_of_model.run(received[0] if received else None, self._feed.inputs)

    @override
    def train(self, mode: bool = True) -> UntracedStage:
        super().train(mode)
        self.forward_of_model.train(mode)
        return self


class _StageForward:
    """The model's forward with stand-ins; not a module, so its modules are not those of the stage."""

    def __init__(self, model: nn.Module, chain: LayerChain, layers: Sequence[str]) -> None:
        self.chain = chain
        self.received: Tensor | None = None
        self.has_entered = False
        self._kind = type(model).__name__
        self._is_first, self._is_last = layers[0] == chain.layers[0], layers[-1] == chain.layers[-1]
        self._spec: TreeSpec | None = None
        self._leaves: list[Any] = []
        stand_ins: dict[str, nn.Module] = {}
        for name in chain.layers:
            layer = model.get_submodule(name)
            if name not in layers:
                is_later = chain.layers.index(name) > chain.layers.index(layers[-1])
                stand_ins[name] = _LaterLayer(layer, self) if is_later else _EarlierLayer(layer, self)
        if not self._is_first:
            stand_ins[layers[0]] = _FirstLayer(model.get_submodule(layers[0]), self)
            for name in chain.before:
                stand_ins[name] = _Embedded(model.get_submodule(name), self)
        self.model = _clone(model, "", stand_ins)

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def run(self, received: Tensor | None, inputs: Mapping[str, Any]) -> Any:
        """The hidden state after this stage's layers, or the tensors of the model's output."""
        assert (received is None) == self._is_first, "the first stage alone receives nothing"
        self.received, self.has_entered = received, False
        try:
            out = self.model(**inputs)
        except _StageEnds as end:
            return end.hidden
        finally:
            self.received = None
        if not self._is_last:
            raise InvalidArgument(
                f"the forward of {self._kind} ended without running the layers of the next stage",
                hint="a pipeline needs layers that all run in every forward; set mesh.pp = 1",
            )
        return self._taken_apart(out)

    def _taken_apart(self, out: Any) -> Any:
        leaves, self._spec = tree_flatten(out)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if not tensors:
            raise InvalidArgument(
                f"the output of {self._kind} has no tensors that a pipeline can see",
                hint="return tensors, or a mapping or tuple of them",
                output=type(out).__name__,
            )
        self._leaves = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        return tensors if len(tensors) > 1 else tensors[0]

    def restored(self, tensors: Any) -> Any:
        """The model's output from its tensors, as the last run of this stage returned them."""
        assert self._spec is not None, "this stage has run"
        given = iter(tensors if isinstance(tensors, tuple) else (tensors,))
        return tree_unflatten([next(given) if leaf is None else leaf[0] for leaf in self._leaves], self._spec)


class _StageEnds(Exception):
    """Ends the model's forward after the last layer of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the stage's last layer has run")
        self.hidden = hidden


class _StandIn(nn.Module):
    """In a layer's place in the forward; models read attributes of their layers, so it has those of the layer."""

    def __init__(self, module: nn.Module, stage: _StageForward) -> None:
        super().__init__()
        # Not as a submodule: its parameters are not those of the stage.
        self.__dict__["_module"], self.__dict__["_stage"] = module, stage

    @override
    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    @override
    def train(self, mode: bool = True) -> _StandIn:
        self.__dict__["_module"].train(mode)
        return super().train(mode)


class _EarlierLayer(_StandIn):
    """Hands on the hidden state."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage.chain.result(self._stage.received)


class _FirstLayer(_StandIn):
    """The first layer of a stage: it runs on the hidden state that was received."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: _StageForward = self._stage
        assert stage.received is not None, "a later stage receives a hidden state"
        stage.has_entered = True
        args, kwargs = stage.chain.with_hidden(args, kwargs, stage.received)
        return self._module(*args, **kwargs)


class _LaterLayer(_StandIn):
    """Ends the forward."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _StageEnds(self._stage.chain.hidden(args, kwargs))


class _Embedded(_StandIn):
    """An embedding of the first stage. Later stages need only the shape of its result, which the hidden state has."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: _StageForward = self._stage
        assert stage.received is not None, "a later stage receives a hidden state"
        # After the layers it is the real one: some heads are the embedding itself.
        return self._module(*args, **kwargs) if stage.has_entered else stage.received.detach()


def _clone(module: nn.Module, name: str, stand_ins: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a module and of those on the way to a stand-in; it shares everything else."""
    twin: nn.Module = module.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    forward = module.__dict__.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        twin.__dict__["forward"] = MethodType(forward.__func__, twin)
    elif forward is not None and hasattr(forward, "bound_to"):
        twin.__dict__["forward"] = forward.bound_to(twin)
    elif forward is not None:
        raise ConfigurationError(
            f"{name or type(module).__name__} has a forward of its own that is bound to the whole model",
            hint="wrap the model after parallelize(), or set mesh.pp = 1",
            forward=type(forward).__name__,
        )
    twin._modules = type(module._modules)()
    for key, child in module._modules.items():
        full = f"{name}.{key}" if name else key
        if full in stand_ins:
            twin._modules[key] = stand_ins[full]
        elif child is not None and any(one.startswith(f"{full}.") for one in stand_ins):
            twin._modules[key] = _clone(child, full, stand_ins)
        else:
            twin._modules[key] = child
    return twin


def _place(stage: nn.Module, name: str, model: nn.Module) -> None:
    """Give a stage a module or a parameter of the model under its name there."""
    *path, last = name.split(".")
    holder, source = stage, model
    for part in path:
        if part not in holder._modules:
            holder.add_module(part, nn.Module())
        holder, source = holder.get_submodule(part), source.get_submodule(part)
    if last in source._modules:
        holder.add_module(last, source.get_submodule(last))
    else:
        holder.register_parameter(last, source.get_parameter(last))


def check_stages(
    make: Callable[[int], nn.Module],
    num_stages: int,
    feed: Microbatches,
    model: nn.Module,
    example: Mapping[str, Any],
) -> None:
    """Raise ConfigurationError unless the stages give the model's output on `example`; needs the whole model.

    Finds what no look at modules can: a value that a layer takes from elsewhere than the layer before.
    """
    feed.load(example, None, 1)
    with trying(model):
        expected = [leaf for leaf in tree_leaves(model(**example)) if isinstance(leaf, Tensor)]
        values: tuple[Any, ...] = ()
        for index in range(num_stages):
            stage = make(index)
            assert isinstance(stage, UntracedStage), "stages that keep the model's forward"
            stage.eval()
            try:
                values = (stage(*values),)
            except Exception as error:
                # The model's own code runs here, on a hidden state in place of its embeddings: it may raise anything.
                raise ConfigurationError(
                    f"stage {index} of {type(model).__name__} cannot run by itself: {first_line(error)}",
                    hint="its forward needs more than the hidden state of the layer before; set mesh.pp = 1",
                ) from error
    found = values[0] if isinstance(values[0], tuple) else values
    if len(found) != len(expected) or not all(
        torch.allclose(one, other, rtol=1e-3, atol=1e-4, equal_nan=True)
        for one, other in zip(found, expected, strict=True)
    ):
        raise ConfigurationError(
            f"the stages of {type(model).__name__} do not compute what the model computes: a layer uses something other"
            " than the result of the layer before, such as the embeddings or an earlier layer",
            hint="a pipeline sends the hidden state alone; set mesh.pp = 1",
        )
