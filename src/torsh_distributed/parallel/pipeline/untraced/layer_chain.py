"""The layers of a model whose forward cannot be traced, and what runs around them: found by running it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.models.probing import trying
from torsh_distributed.parallel.torch_internals import tree_leaves


@dataclass(frozen=True)
class LayerChain:
    """The layers of a model in the order they run, each on the result of the one before."""

    layers: tuple[str, ...]
    before: tuple[str, ...]
    """Modules with parameters that run before the first layer: embeddings."""
    after: tuple[str, ...]
    """Modules with parameters that run after the last layer, such as norm and head; also those that never run."""
    direct: tuple[str, ...]
    """Parameters that the model's own forward reads after the last layer."""
    argument: str | None
    """Name under which a layer gets the hidden state; None: it is the first positional argument."""
    result_length: int | None
    """Length of the tuple that a layer returns, the hidden state first; None: it returns the hidden state."""
    example: Mapping[str, Any] = field(repr=False, compare=False)
    """What the model was run on."""

    def hidden(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """The hidden state among the arguments of a layer."""
        value: Tensor = args[0] if self.argument is None else kwargs[self.argument]
        return value

    def with_hidden(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's arguments with another hidden state."""
        if self.argument is None:
            return (value, *args[1:]), kwargs
        return args, {**kwargs, self.argument: value}

    def result(self, value: Tensor) -> Any:
        """What a layer would return for a hidden state."""
        return value if self.result_length is None else (value, *([None] * (self.result_length - 1)))


def find_chain(model: nn.Module, layers: Sequence[str], example: Mapping[str, Any]) -> LayerChain:
    """Run `model` once on `example` and note what its `layers` and the modules around them do.

    Raises ConfigurationError, naming the module, if the layers are not one chain. Nothing is changed.
    """
    _require_steady(model)
    notes = _Notes(model, layers)
    with trying(model), notes:
        model(**example)
    notes.check()
    before = tuple(name for name, phases in notes.units.items() if "before" in phases)
    after = tuple(name for name, phases in notes.units.items() if "after" in phases or not phases)
    return LayerChain(
        layers=tuple(layers),
        before=before,
        after=after,
        direct=tuple(notes.direct),
        argument=notes.argument,
        result_length=notes.result_length,
        example=dict(example),
    )


def measure_chain(model: nn.Module, chain: LayerChain, *, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each layer on the chain's example, minimum of `repeats` runs."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[name] = (args, kwargs)

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in chain.layers
    ]
    try:
        with trying(model):
            model(**chain.example)
            return [
                min(_seconds(model.get_submodule(name), chain, *calls[name]) for _ in range(repeats))
                for name in chain.layers
            ]
    finally:
        for handle in handles:
            handle.remove()


def _seconds(layer: nn.Module, chain: LayerChain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    hidden = chain.hidden(args, kwargs).detach().requires_grad_()
    args, kwargs = chain.with_hidden(args, kwargs, hidden)
    started = time.perf_counter()
    with torch.enable_grad():
        out = layer(*args, **kwargs)
        result = out[0] if isinstance(out, tuple) else out
        trained = [param for param in layer.parameters() if param.requires_grad]
        torch.autograd.grad(result, [hidden, *trained], torch.ones_like(result), allow_unused=True)
    return time.perf_counter() - started


class _Notes:
    """What runs when in one forward: a context manager around it, then `check`."""

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self._model, self._layers = model, tuple(layers)
        self._kind = type(model).__name__
        self.ran: list[str] = []
        self._args: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._results: dict[str, Any] = {}
        around = {parent for name in layers for parent in _parents(name)}
        below = tuple(f"{name}." for name in layers)
        self._outside = {
            name: module
            for name, module in model.named_modules(remove_duplicate=False)
            if name not in around and name not in layers and not name.startswith(below)
        }
        self._called: dict[str, set[str]] = {}
        self._outputs: dict[str, Any] = {}
        self._running = 0
        """Modules outside the layers that are being called."""
        self._read: dict[int, set[str]] = {}
        """Parameters outside the layers that the model's own forward reads: in which parts of it."""
        self._stack = ExitStack()
        self.units: dict[str, set[str]] = {}
        self.direct: list[str] = []
        self.argument: str | None = None
        self.result_length: int | None = None

    @property
    def phase(self) -> str:
        """Where the forward is: before, between or after the layers."""
        if not self.ran:
            return "before"
        return "after" if self._layers[-1] in self._results else "between"

    def __enter__(self) -> None:
        for name in self._layers:
            layer = self._model.get_submodule(name)
            self._hook(layer.register_forward_pre_hook(self._enter(name), with_kwargs=True))
            self._hook(layer.register_forward_hook(self._leave(name)))
        for name, module in self._outside.items():
            self._hook(module.register_forward_pre_hook(self._call(name)))
            self._hook(module.register_forward_hook(self._returned(name)))
        inside = {id(p) for name in self._layers for p in self._model.get_submodule(name).parameters()}
        outside = {id(param) for param in self._model.parameters()} - inside
        self._stack.enter_context(_ReadParams(outside, self._note_read))

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _note_read(self, param: int) -> None:
        # Inside a module its call says when; the same parameter may be tied to another module.
        if not self._running:
            self._read.setdefault(param, set()).add(self.phase)

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.ran.append(name)
            self._args[name] = (args, kwargs)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._results[name] = out

        return hook

    def _call(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._called.setdefault(name, set()).add(self.phase)
            self._running += 1

        return hook

    def _returned(self, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._outputs[name] = out
            self._running -= 1

        return hook

    def check(self) -> None:
        """Raise ConfigurationError unless the layers are a chain; fills what the chain consists of."""
        self._check_order()
        self._check_arguments()
        self._find_units()

    def _check_order(self) -> None:
        twice = next((name for name in self.ran if self.ran.count(name) > 1), None)
        if twice is not None:
            raise ConfigurationError(
                f"the layer {twice} of {self._kind} runs more than once in a forward, so it does not fit in one stage",
                hint="set mesh.pp = 1; other axes do not mind",
            )
        if tuple(self.ran) != self._layers:
            missing = [name for name in self._layers if name not in self.ran]
            raise ConfigurationError(
                f"the layers of {self._kind} do not run one after the other"
                + (f": {missing[0]} did not run" if missing else f": {self.ran[0]} ran first"),
                hint="a pipeline needs layers that all run, in order; set mesh.pp = 1",
                ran=self.ran,
            )

    def _check_arguments(self) -> None:
        args, kwargs = self._args[self._layers[0]]
        floating = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point()]
        if not args or not isinstance(args[0], Tensor):
            if not floating:
                raise ConfigurationError(
                    f"the layer {self._layers[0]} of {self._kind} takes no tensor as its first argument",
                    hint="a stage sends the hidden state, which a layer takes first",
                    key="mesh.pp",
                )
            self.argument = "hidden_states" if "hidden_states" in floating else floating[0]
        result = self._results[self._layers[0]]
        if isinstance(result, tuple):
            self.result_length = len(result)
            result = result[0]
        if not isinstance(result, Tensor):
            raise ConfigurationError(
                f"the layer {self._layers[0]} of {self._kind} returns {type(result).__name__}, which no stage can send",
                hint="a layer returns the hidden state, or a tuple that begins with it",
                key="mesh.pp",
            )

    def _find_units(self) -> None:
        """The outermost modules with parameters that the forward calls outside the layers, and when."""
        held: set[int] = set()
        for name, module in self._outside.items():
            inside = any(name.startswith(f"{unit}.") for unit in self.units)
            if inside or next(module.parameters(), None) is None:
                continue
            if name not in self._called and any(child.startswith(f"{name}.") for child in self._called):
                continue  # the forward calls what is in it
            phases = set(self._called.get(name, ()))
            for param in module.parameters():
                if id(param) not in held:
                    phases |= self._read.get(id(param), set())
                held.add(id(param))
            self.units[name] = phases
            self._check_unit(name, phases)
        for param_name, param in self._model.named_parameters():
            if id(param) in held or any(param_name.startswith(f"{layer}.") for layer in self._layers):
                continue
            phases = self._read.get(id(param), set())
            if phases - {"after"}:
                raise ConfigurationError(
                    f"the forward of {self._kind} reads the parameter {param_name} itself before its last layer, so"
                    " every stage would need it",
                    hint="put it into a module of its own that the forward calls, or set mesh.pp = 1",
                )
            self.direct.append(param_name)

    def _check_unit(self, name: str, phases: set[str]) -> None:
        if "between" in phases:
            raise ConfigurationError(
                f"{name} of {self._kind} has parameters and runs between the layers, so every stage would need it",
                hint="make it a part of each layer, or set mesh.pp = 1",
            )
        if "before" in phases and not isinstance(self._outputs.get(name), Tensor):
            raise ConfigurationError(
                f"{name} of {self._kind} runs before the layers and returns more than one tensor, which later stages"
                " cannot stand in for",
                hint="set mesh.pp = 1",
                returns=type(self._outputs.get(name)).__name__,
            )


_VIEWS = ("T", "mT", "H", "mH", "data", "real", "imag")


class _ReadParams(TorchFunctionMode):
    """Reports parameters that operations read."""

    def __init__(self, params: set[int], note: Callable[[int], None]) -> None:
        super().__init__()
        self._params, self._note = params, note

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Reading an attribute is an operation too; only some of them are values.
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if not is_attribute or getattr(func.__self__, "__name__", "") in _VIEWS:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self._params:
                    self._note(id(leaf))
        return func(*args, **(kwargs or {}))


def _require_steady(model: nn.Module) -> None:
    """Refuse what makes the forward depend on chance, or its result on every layer."""
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{kind} is an encoder and a decoder: its layers are two chains, and each decoder layer needs the result of"
            " the whole encoder",
            hint="set mesh.pp = 1; mesh.tp, mesh.shard and mesh.dp split it",
        )
    if getattr(config, "layerdrop", 0):
        raise ConfigurationError(
            f"{kind} leaves out layers at random (layerdrop {config.layerdrop:g}), so stages would wait for each other",
            hint="set layerdrop = 0 in its config",
            key="mesh.pp",
        )
    for name in ("output_router_logits", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            raise ConfigurationError(
                f"{kind} has {name} = True in its config: it collects results of all layers, and a stage has only its"
                " own",
                hint=f"set model.config.{name} = False",
                key="mesh.pp",
            )


def _parents(name: str) -> list[str]:
    """The modules around one, the model itself (empty) included."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]
