"""The config of a script: found among its arguments, read, and checked for what this engine does not do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedMistake, require
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.plan import Plan

_OWN_WAYS = {
    "gradient_allreduce_op",
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
}
"""Keys that a plan has no counterpart of, and this engine has."""
_OWN_PARTS = ("zero_optimization.offload_", "zero_optimization.cpu_offload", "optimizer.", "scheduler.")
"""Beginnings of such keys: the engine has its own optimizers, and offloads as DeepSpeed does."""
_BOTH = (
    "Not sure how to proceed, we were given deepspeed configs in the deepspeed arguments and deepspeed.initialize()"
    " function call"
)
_OTHER_ENGINES = {
    "hybrid_engine": "train and generate with this engine: call engine.module.generate under eval()",
    "autotuning": "let `torsh plan` choose",
    "compression_training": "quantise or prune with torchao",
    "nebula": "checkpoints are written by this engine itself",
    "sparse_attention": "use FlexAttention",
    "eigenvalue": "leave it out",
    "quantize_training": "quantise with torchao",
    "amp": "use bf16 or torch_autocast",
}


def find_config(args: Any, given: Any) -> DeepSpeedConfig:
    """The one config among a script's arguments and those of `initialize`; an unknown key is an error."""
    old = getattr(args, "deepscale_config", None)
    if old is not None:
        require(
            getattr(args, "deepspeed_config", None) is None,
            "Not sure how to proceed, we were given both a deepscale_config and deepspeed_config",
        )
    named = old if old is not None else getattr(args, "deepspeed_config", None)
    require(named is None or given is None, _BOTH, hint="give the config in one place")
    chosen = given if given is not None else named
    require(
        chosen is not None,
        "DeepSpeed requires --deepspeed_config to specify configuration file",
        hint="pass config=… to initialize(), or --deepspeed_config to the script",
    )
    assert chosen is not None, "checked above"
    if isinstance(chosen, Mapping) and chosen.get("steps_per_print") == math.inf:
        # How Accelerate says "never".
        chosen = {key: value for key, value in chosen.items() if key != "steps_per_print"}
    found = chosen if isinstance(chosen, DeepSpeedConfig) else DeepSpeedConfig(chosen)
    _refuse_other_engines(found.values)
    return found


def settings_of(config: DeepSpeedConfig, num_ranks: int, *, is_pipeline: bool = False) -> RunSettings:
    """A config for a world in which `num_ranks` ranks have their own part of every batch."""
    try:
        batch = config.batch(num_ranks)
    except ConfigurationError as error:
        raise DeepSpeedMistake(error.message, hint=error.hint, **error.context) from error
    settings = RunSettings(config.values, batch, num_ranks)
    settings.plan = None if is_pipeline else _plan_of(config)
    return settings


def _plan_of(config: DeepSpeedConfig) -> Plan:
    """The config as a plan; what this engine cannot do, and has no way of its own for, is refused, all at once."""
    plan, report = config.to_plan()
    refused = [entry for entry in report.refused if entry.key not in _OWN_WAYS and not entry.key.startswith(_OWN_PARTS)]
    if refused:
        raise FeatureNotAvailable(
            "; ".join(f"{entry.key} = {entry.value}: {entry.reason}" for entry in refused),
            hint="change these keys of the DeepSpeed config",
            keys=[entry.key for entry in refused],
        )
    split = [axis for axis in ("tp", "pp", "cp", "ep") if getattr(plan.mesh, axis) > 1]
    if split:
        raise FeatureNotAvailable(
            f"this engine spreads data over all ranks; the config also splits the model (mesh.{split[0]} of a plan)",
            hint="train with torsh_distributed.parallelize and the plan that `torsh migrate` writes",
        )
    return plan


def _refuse_other_engines(config: Mapping[str, Any]) -> None:
    """Sections that ask for another engine than ours."""
    for name, hint in _OTHER_ENGINES.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled", name == "sparse_attention"):
            raise FeatureNotAvailable(f"the section {name} of a DeepSpeed config is not supported", hint=hint, key=name)
