"""A small example of a model's inputs, to run it on before training: given by the user, or made from what it says.

Values for a run of a model that has none: each module gets them when it is called and loses them when it returns.
A model on the meta device can then be run on a few tokens to see what runs when, and no rank holds it whole. The values
are random, the same at every call: two runs can be compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.torch_internals import tree_leaves

_device: ContextVar[torch.device | None] = ContextVar("device of values that pass", default=None)

_PERIOD = 4093
"""Prime, so no row of a matrix repeats the one before."""


def run_device(model: nn.Module) -> torch.device:
    """Where a run of the model computes: the device of its parameters, or of the values that they get for a run."""
    passing = _device.get()
    return passing or next((param.device for param in model.parameters()), torch.device("cpu"))


@contextmanager
def passing_values(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, modules of `model` with parameters on meta have values on `device` while they are called.

    What a module reads of another one, without calling it, stays on meta: such a forward raises RuntimeError.
    """
    seeds = {id(param): number for number, param in enumerate(model.parameters())}
    token = _device.set(device)
    try:
        with ExitStack() as stack:
            stack.enter_context(_RequireValues())
            for module in model.modules():
                own = [*module._parameters.values(), *module._buffers.values()]
                if any(one is not None and one.is_meta for one in own):
                    _hook(module, seeds, device, stack)
            yield
    finally:
        _device.reset(token)


class _RequireValues(TorchFunctionMode):
    """Raises where an operation takes a tensor on meta and returns another one: torch computes garbage with them."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_real = any(isinstance(one, Tensor) and not one.is_meta for one in tree_leaves(out))
        if is_real and any(isinstance(one, Tensor) and one.is_meta for one in tree_leaves((args, kwargs))):
            raise RuntimeError("the forward reads a parameter of a module that it does not call")
        return out


def _hook(module: nn.Module, seeds: dict[int, int], device: torch.device, stack: ExitStack) -> None:
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def enter(called: nn.Module, _: object) -> None:
        before = (dict(called._parameters), dict(called._buffers))
        held.append(before)
        for name, param in before[0].items():
            if param is not None and param.is_meta:
                value = _value(param, seeds.get(id(param), 0), device)
                called._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
        for name, buffer in before[1].items():
            if buffer is not None and buffer.is_meta:
                called._buffers[name] = torch.ones(buffer.shape, dtype=buffer.dtype, device=device)

    def leave(called: nn.Module, *_: object) -> None:
        params, buffers = held.pop()
        called._parameters.update(params)
        called._buffers.update(buffers)

    def restore() -> None:
        if held:  # a forward that ended with an exception
            module._parameters.update(held[0][0])
            module._buffers.update(held[0][1])

    before = module.register_forward_pre_hook(enter)
    after = module.register_forward_hook(leave, always_call=True)
    stack.callback(restore)
    stack.callback(before.remove)
    stack.callback(after.remove)


def _value(param: Tensor, seed: int, device: torch.device) -> Tensor:
    """Random values at which a layer changes what passes through it and keeps its size; repeated, to be quick."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(_PERIOD, generator=generator) - 0.5
    values = 1 + drawn if param.dim() < 2 else drawn * (12 / max(1, param.shape[-1])) ** 0.5
    few = values.to(device=device, dtype=param.dtype)
    return few.repeat(-(-param.numel() // _PERIOD))[: param.numel()].view(param.shape)


LENGTH = 8
"""Tokens of a made example."""


def named_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The inputs of a forward by the names of its arguments: a mapping as it is, others as forward would take them."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    try:
        return dict(inspect.signature(model.forward).bind_partial(*given).arguments)
    except TypeError as error:
        raise InvalidArgument(
            f"the batch does not fit the forward of {type(model).__name__}: {error}",
            hint="pass the inputs by name, as a mapping",
        ) from error


def example_inputs(model: nn.Module, given: Any = None) -> dict[str, Any]:
    """One sample for `model`, by the names of forward's arguments: `given`, or made from a transformers' config."""
    return without_cache(model, _example(model) if given is None else named_inputs(model, given))


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs; the model keeps no keys and values for generation."""
    return {**inputs, "use_cache": False} if takes(model, "use_cache") else dict(inputs)


def keep_no_cache_in_training(model: nn.Module) -> None:
    """Let a model of transformers keep no keys and values for generation while it trains, unless a batch asks for it.

    It does so by default. A layer that is recomputed would find its own keys there and attend to them twice, and a
    compiled one would be compiled again for every layer, because each has another place in the cache.
    """
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module, "base_model_prefix") and takes(module, "use_cache"):
            place = list(inspect.signature(module.forward).parameters).index("use_cache")
            module.register_forward_pre_hook(partial(_leave_out_cache, place), with_kwargs=True)
            return


def _leave_out_cache(
    place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    is_given = len(args) > place or "use_cache" in kwargs or kwargs.get("past_key_values") is not None
    return None if is_given or not module.training else (args, {**kwargs, "use_cache": False})


def _example(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    device = run_device(model)
    if name == "input_ids" and config is not None:
        ids = _ids(model, config, device)
        # A decoder behind an encoder has a sequence of its own, which some models make of labels alone.
        has_own = getattr(config, "is_encoder_decoder", False) and takes(model, "decoder_input_ids")
        return {"input_ids": ids, "decoder_input_ids": ids} if has_own else {"input_ids": ids}
    if name == "pixel_values" and config is not None and getattr(config, "image_size", None):
        size = config.image_size
        height, width = size if isinstance(size, tuple | list) else (size, size)
        shape = (1, getattr(config, "num_channels", 3), height, width)
        dtype = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)
        return {"pixel_values": torch.linspace(-1, 1, shape[1] * height * width).view(shape).to(device, dtype)}
    raise ConfigurationError(
        f"{type(model).__name__} has to run once on a small example, and none can be made for it",
        hint="pass one microbatch: parallelize(…, example=(inputs,)), or a mapping of the arguments of forward",
        main_input=name,
        keys=("mesh.pp", "mesh.cp"),
    )


def _ids(model: Any, config: Any, device: torch.device) -> Tensor:
    """Different tokens, none of them the one for padding."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", 0) or model.get_input_embeddings().num_embeddings)
    padding = getattr(text, "pad_token_id", None)
    ids = [number for number in range(vocabulary) if number != padding][1 : LENGTH + 1]
    return torch.tensor([(ids * LENGTH)[:LENGTH]], device=device)


def takes(model: nn.Module, name: str) -> bool:
    """Whether forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


def takes_any(model: nn.Module) -> bool:
    """Whether forward takes keyword arguments that it does not name."""
    kinds = [one.kind for one in inspect.signature(model.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds
