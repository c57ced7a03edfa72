"""The config of a script: a file, text or a dict, as a dict of its own."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torsh_distributed.errors import FeatureNotAvailable, IoError
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedConfigError, require

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


def find_config(args: Any, given: Any) -> dict[str, Any]:
    """The one config among a script's arguments and those of `initialize`."""
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
    found = read_config(chosen)
    refuse_other_engines(found)
    return found


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """A config as a dict of its own: changes of it do not reach the script's."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    try:
        found = json.loads(Path(source).read_text())
    except OSError as error:
        raise IoError("the DeepSpeed config cannot be read", path=str(source), reason=str(error)) from error
    except ValueError as error:
        raise DeepSpeedConfigError("the DeepSpeed config is no JSON", path=str(source), reason=str(error)) from error
    if not isinstance(found, dict):
        raise DeepSpeedConfigError("a DeepSpeed config holds keys and values", path=str(source))
    return found


def refuse_other_engines(config: Mapping[str, Any]) -> None:
    """Sections that ask for another engine than ours."""
    for name, hint in _OTHER_ENGINES.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled", name == "sparse_attention"):
            raise FeatureNotAvailable(f"the section {name} of a DeepSpeed config is not supported", hint=hint, key=name)
