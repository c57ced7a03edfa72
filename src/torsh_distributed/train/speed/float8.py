"""fp8 training: linear layers whose products are computed in 8 bits by torchao, with scales found at every step."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging

import torch
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.parallel.models.wrapping import matching
from torsh_distributed.plan.sections.training import PrecisionConfig
from torsh_distributed.train.speed.deferred_logits import find_head

_log = logging.getLogger(__name__)

_WIDE = 2048
"""From this width on fp8 products gained more than their conversions cost, on an H200."""
_MULTIPLE = 16
"""Sizes that the hardware's fp8 products take."""
_FIRST_CAPABILITY = (8, 9)
"""NVIDIA's first generation with fp8: Ada; then Hopper and Blackwell."""


def use_float8(model: nn.Module, config: PrecisionConfig, device: torch.device) -> list[str]:
    """Replace the model's linear layers by fp8 ones, in place, where the config says so; returns their names.

    Parameters stay the same objects under the same names, in their dtype: optimizer, shards and checkpoints do not
    notice. The head stays in bf16, because rounding it costs the loss directly; so do layers whose sizes fp8 products
    do not take, and those in `fp8_skip`.
    """
    _require_hardware(config, device)
    if importlib.util.find_spec("torchao") is None:
        raise FeatureNotAvailable(
            'precision.dtype = "fp8" needs torchao',
            hint='pip install "torsh-distributed[fp8]"',
            feature="fp8",
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8GemmConfig

    of_gradients = Float8GemmConfig(use_fast_accum=config.fp8_fast_accumulation)
    recipe = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(config.fp8_recipe),
        emulate=config.fp8_emulate,
        gemm_config_grad_input=of_gradients,
        gemm_config_grad_weight=of_gradients,
    )
    chosen = _suitable(model, config)
    if not chosen:
        raise ConfigurationError(
            f'precision.dtype = "fp8": no linear layer of {type(model).__name__} can be computed in fp8',
            hint=f'use "bf16"; fp8 takes linear layers other than the head whose sizes are multiples of {_MULTIPLE}',
            key="precision.dtype",
        )
    _warn_of_narrow(model, chosen)
    is_training = {name: model.get_submodule(name).training for name in chosen}
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, name: name in is_training)
    for name, flag in is_training.items():
        module = model.get_submodule(name).train(flag)
        if device.type == "cpu":
            module.register_forward_pre_hook(_in_autocast_dtype)
    return chosen


def _warn_of_narrow(model: nn.Module, chosen: list[str]) -> None:
    """Say so where most of the products are too small to gain from 8 bits."""
    layers = [one for one in map(model.get_submodule, chosen) if isinstance(one, nn.Linear)]
    sizes = [(min(one.in_features, one.out_features), one.weight.numel()) for one in layers]
    narrow = sum(numel for width, numel in sizes if width < _WIDE)
    if 2 * narrow > sum(numel for _, numel in sizes):
        _log.warning(
            "fp8 hardly pays here: most products are narrower than %s; on an H200 it made a Qwen3-0.6B of width 1024"
            " 1.02 times as fast as bf16, a Qwen3-1.7B of width 2048 1.18 times",
            _WIDE,
        )


def _in_autocast_dtype(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What torchao does for autocast on a GPU only: inputs in its dtype."""
    return (args[0].to(torch.get_autocast_dtype("cpu")), *args[1:]) if torch.is_autocast_enabled("cpu") else args


def _suitable(model: nn.Module, config: PrecisionConfig) -> list[str]:
    skipped = {id(module) for module in matching(model, names=config.fp8_skip, section="precision.fp8_skip").values()}
    head = find_head(model)
    if head is not None:
        skipped.add(id(head[1]))
    return [
        name
        for name, module in model.named_modules()
        if name
        and type(module) is nn.Linear
        and id(module) not in skipped
        and module.in_features % _MULTIPLE == 0
        and module.out_features % _MULTIPLE == 0
    ]


def _require_hardware(config: PrecisionConfig, device: torch.device) -> None:
    if config.fp8_emulate:
        return
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise FeatureNotAvailable(
            f'precision.dtype = "fp8" is for GPUs with fp8 products (Ada, Hopper, Blackwell), and this is {name}',
            hint='use "bf16", or precision.fp8_emulate = true to see the numbers of fp8 without its speed',
            feature="fp8",
        )
