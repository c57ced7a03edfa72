"""The optimizer of a config's `optimizer` section, with the meaning that DeepSpeed gives its names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.ops.adam_optimizers import DeepSpeedCPUAdam, FusedAdam
from torsh_distributed.migrate.deepspeed.ops.lamb_optimizer import FusedLamb
from torsh_distributed.migrate.deepspeed.ops.lion_optimizer import FusedLion
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings

_COMPRESSED = ("onebitadam", "onebitlamb", "zerooneadam")
_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}


def optimizer_from_config(settings: RunSettings, params: Iterable[Any], module: nn.Module) -> Optimizer:
    """The optimizer over `params`, which may be groups.

    "Adam" is AdamW unless `adam_w_mode` is false, and weight decay is 0 unless given, as in DeepSpeed.
    """
    name = settings.value("optimizer.type")
    require(
        name is not None,
        "there is no optimizer: the config has no section optimizer, and initialize() got none",
        hint='pass optimizer=…, or add {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
    )
    options = {key: _plain(value) for key, value in dict(settings.value("optimizer.params", {})).items()}
    _refuse_auto(options)
    if "max_grad_norm" in options:
        raise ConfigurationError(
            "'max_grad_norm' is not supported as an optimizer parameter",
            hint="use the key gradient_clipping at the top of the config",
        )
    lowered = str(name).lower()
    given = list(params)
    if lowered in ("adam", "adamw"):
        return _adam(lowered, options, given, settings)
    if lowered in _COMPRESSED:
        raise FeatureNotAvailable(
            f"optimizer.type {name} compresses gradients in an optimizer of its own, which is not part of this engine",
            hint="use AdamW, and compress with a plan (compress.method) through torsh_distributed.parallelize",
        )
    if lowered in _MUP:
        return _from_mup(_MUP[lowered], given, options)
    if lowered == "lamb":
        return FusedLamb(given, **options)
    if lowered == "lion":
        return FusedLion(given, **options)
    if lowered == "muon":
        return _muon(given, options, module, settings)
    if lowered == "adagrad":
        return torch.optim.Adagrad(given, **options)
    kind = getattr(torch.optim, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigurationError(
            f"optimizer.type {name} is neither a name of DeepSpeed nor a class of torch.optim",
            hint="names of torch.optim are written as there: SGD, RMSprop",
        )
    return kind(given, **options)


def _adam(name: str, options: dict[str, Any], params: list[Any], settings: RunSettings) -> Optimizer:
    is_decoupled = bool(options.pop("adam_w_mode", True)) or name == "adamw"
    options.pop("fp32_optimizer_states", None)  # they always are
    if options.pop("torch_adam", False):
        return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(params, **options)
    if settings.offloads_optimizer:
        return DeepSpeedCPUAdam(params, adamw_mode=is_decoupled, **options)
    return FusedAdam(params, adam_w_mode=is_decoupled, **options)


def _muon(params: list[Any], options: dict[str, Any], module: nn.Module, settings: RunSettings) -> Optimizer:
    """Muon for matrices, Adam for the rest; it needs whole matrices, so replicas."""
    if settings.stage > 0:
        raise FeatureNotAvailable(
            "Muon needs whole matrices, which ZeRO shards",
            hint="train it with zero_optimization.stage 0, or use AdamW",
        )
    from torsh_distributed.migrate.deepspeed.ops.muon_optimizer import MuonWithAuxAdam

    names = {id(param): name for name, param in module.named_parameters()}
    return MuonWithAuxAdam.from_config(params, options, names)


def _from_mup(name: str, params: list[Any], options: dict[str, Any]) -> Optimizer:
    try:
        import mup  # type: ignore[import-not-found]  # not a dependency
    except ImportError as error:
        raise FeatureNotAvailable(f"optimizer.type {name} needs the package mup", hint="pip install mup") from error
    made: Optimizer = getattr(mup, name)(params, **options)
    return made


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse_auto(options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if value == "auto":
            raise ConfigurationError(
                f'optimizer.params.{key} is "auto", which only a trainer fills in', hint="write a number", key=key
            )
