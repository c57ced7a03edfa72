"""A small example of a model's inputs, to run it on before training: given by the user, or made from what it says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.models.passing_values import run_device

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
