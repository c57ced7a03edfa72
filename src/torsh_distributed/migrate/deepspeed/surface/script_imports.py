"""What published scripts import at their top from corners of DeepSpeed, whether or not they use it afterwards.

DeepSpeed-Chat's LoRA, Megatron-DeepSpeed's `training.py` and GPT-NeoX's `utils.py` do. So these modules are there, with
what has a meaning on this engine; the rest of their names is refused when it is used.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.deepspeed_line import (
    DEFAULT_HOSTFILE,
    Resources,
    exclude,
    include,
    parse_filter,
    read_resources,
)
from torsh_distributed.migrate.deepspeed.surface.op_builders import OpBuilder
from torsh_distributed.migrate.deepspeed.surface.script_helpers import recursive_getattr, recursive_setattr

_log = logging.getLogger(__name__)

Names = dict[str, Any]


def fetch_hostfile(hostfile_path: str) -> OrderedDict[str, int] | None:
    """Slots by host of a file of `HOST slots=N` lines; None, with a warning, if there is no such file."""
    if not Path(hostfile_path).is_file():
        _log.warning("there is no hostfile %s: this machine's resources alone are used", hostfile_path)
        return None
    return OrderedDict((host, len(slots)) for host, slots in read_resources(hostfile_path).items())


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """The slots that are used by host: those that `host:0,2@other` names, or all but those."""
    require(not (inclusion and exclusion), "include_str and exclude_str are mutually exclusive.")
    found: Resources = {host: list(range(slots)) for host, slots in resource_pool.items()}
    if inclusion:
        found = include(found, parse_filter(inclusion, "inclusion"))
    elif exclusion:
        found = exclude(found, parse_filter(exclusion, "exclusion"))
    return OrderedDict(found)


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """The state as it is: no layer drops tokens here."""
    return OrderedDict(state_dict)


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's tokens among those that share a layer: all of them, as layers are whole on every rank."""
    return input_


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The tokens of all ranks that share a layer: this rank's."""
    return input_


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """This rank's place among those that share a layer, as an `mpu` of any age says it."""
    return _asked(mpu, "rank", 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """How many ranks share a layer, as an `mpu` of any age says it."""
    return _asked(mpu, "world_size", 1)


def _asked(mpu: Any, what: str, without: int) -> int:
    spellings = (f"get_{axis}_parallel_{what}" for axis in ("tensor_model", "slice", "model"))
    found = next((getattr(mpu, name) for name in spellings if hasattr(mpu, name)), None)
    return without if found is None else int(found())


def import_names() -> dict[str, Names]:
    """The modules with what works in them."""
    routing = "deepspeed.runtime.data_pipeline.data_routing"
    return {
        "deepspeed.compression": {},
        "deepspeed.compression.compress": {},
        "deepspeed.compression.helper": {
            "recursive_getattr": recursive_getattr,
            "recursive_setattr": recursive_setattr,
        },
        routing: {},
        f"{routing}.basic_layer": {},
        f"{routing}.helper": {"remove_random_ltd_state_dict": remove_random_ltd_state_dict},
        "deepspeed.launcher": {},
        "deepspeed.launcher.runner": {
            "DLTS_HOSTFILE": DEFAULT_HOSTFILE,
            "fetch_hostfile": fetch_hostfile,
            "parse_inclusion_exclusion": parse_inclusion_exclusion,
        },
        "deepspeed.moe.mappings": {"drop_tokens": drop_tokens, "gather_tokens": gather_tokens},
        "deepspeed.ops.op_builder.builder": {"OpBuilder": OpBuilder},
        "deepspeed.utils.bwc": {
            "bwc_tensor_model_parallel_rank": bwc_tensor_model_parallel_rank,
            "bwc_tensor_model_parallel_world_size": bwc_tensor_model_parallel_world_size,
        },
    }
