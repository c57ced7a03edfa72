"""The config of a script: found among its arguments, read, and checked for what this engine does not do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedMistake, require
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings

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


def settings_of(config: DeepSpeedConfig, num_ranks: int) -> RunSettings:
    """A config for a world in which `num_ranks` ranks have their own part of every batch."""
    try:
        batch = config.batch(num_ranks)
    except ConfigurationError as error:
        raise DeepSpeedMistake(error.message, hint=error.hint, **error.context) from error
    return RunSettings(config.values, batch, num_ranks)


def _refuse_other_engines(config: Mapping[str, Any]) -> None:
    """Sections that ask for another engine than ours."""
    for name, hint in _OTHER_ENGINES.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled", name == "sparse_attention"):
            raise FeatureNotAvailable(f"the section {name} of a DeepSpeed config is not supported", hint=hint, key=name)
