"""Checkpoints of scripts with torch's own DDP, FSDP1 or FSDP2, as a state that any of our plans can load.

A file of `torch.save` holds the model's state dict, or a dict with it beside the optimizer's; a directory of
`torch.distributed.checkpoint` holds the same in shards. Parts are told apart by what they look like, names lose what
wrappers add to them, and an optimizer that counts its parameters gets their names from the model's order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.foreign_state import (
    ForeignState,
    PiecedTensor,
    keep_foreign,
    load_foreign,
    plain_settings,
)
from torsh_distributed.migrate.pytorch.torch_files import INDEX, read_torch_directory, read_torch_file
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER
from torsh_distributed.train.engine import Engine
from torsh_distributed.unreadable_data import unreadable_as

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights", "app")
_SCHEDULE_KEYS = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
_STEP_KEYS = ("step", "global_step", "global_steps", "num_steps", "iteration", "iter", "steps")
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names that buffers have in torch's own layers."""


def open_torch_checkpoint(
    source: str | Path, *, model_key: str | None = None, inert: Sequence[str] = ()
) -> ForeignState:
    """What a script saved with torch.save (a file) or torch.distributed.checkpoint (a directory).

    `model_key`: where the model's state dict is, if several parts look like one. `inert`: as in `foreign_state`. Raises
    CheckpointError for files that are damaged or name other classes, and where parts or names cannot be told apart.
    """
    path = Path(source)
    with unreadable_as(
        CheckpointError, f"{path.name} is not a checkpoint of torch", hint="copy it again", path=str(path)
    ):
        return _opened(path, model_key, inert)


def _opened(path: Path, model_key: str | None, inert: Sequence[str]) -> ForeignState:
    is_directory = (path / INDEX).is_file()
    content = read_torch_directory(path, inert=inert) if is_directory else read_torch_file(path, inert=inert)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path.name} holds a {type(content).__name__}, not a state dict", path=str(path))
    if set(content) == {"app"} and isinstance(content["app"], Mapping):  # torch's recipe for stateful objects
        content = content["app"]
    weights, rest = _split(content, model_key, path)
    tensors = {f"{MODEL}.{name}": one for name, one in weights.items()}
    values: dict[str, Any] = {MODEL: {}}
    optimizer = next((key for key, part in rest.items() if _is_optimizer(part)), None)
    num_steps = next((int(rest[key]) for key in _STEP_KEYS if isinstance(rest.get(key), int | float)), 0)
    if optimizer is not None:
        moments, values[OPTIMIZER] = _named_optimizer(rest.pop(optimizer), weights, path)
        tensors |= {f"{OPTIMIZER}.state.{name}": one for name, one in moments.items()}
        steps = [int(one.read()) for name, one in moments.items() if name.endswith(".step")]
        num_steps = num_steps or max(steps, default=0)
    schedule = next((rest.pop(key) for key in _SCHEDULE_KEYS if isinstance(rest.get(key), Mapping)), None)
    values["engine"] = {
        "precision": {},
        "learning_rate": {"factor": 1.0, "scheduler": schedule},
        "num_steps": num_steps,
        "num_skipped": 0,
        "epoch": 0,
        "num_batches": 0,
        "position": None,
    }
    return ForeignState(path, tensors, values, step=num_steps, client_state=_read_all(rest))


def load_torch_checkpoint(
    engine: Engine,
    source: str | Path,
    *,
    model_key: str | None = None,
    model_only: bool = False,
    strict: bool = True,
    inert: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Load what plain torch saved into an Engine, under any plan; every rank calls this. Returns the script's values.

    Without an optimizer in the checkpoint, weights and buffers alone.
    """
    saved = open_torch_checkpoint(source, model_key=model_key, inert=inert)
    load_foreign(engine, saved, model_only=model_only or OPTIMIZER not in saved.values, strict=strict)
    return saved.client_state


def convert_torch_checkpoint(
    source: str | Path, directory: str | Path, *, model_key: str | None = None, inert: Sequence[str] = ()
) -> Path:
    """Write what plain torch saved as our checkpoint, which `engine.load` reads; returns its directory."""
    saved = open_torch_checkpoint(source, model_key=model_key, inert=inert)
    require_optimizer(saved)
    return keep_foreign(saved, directory)


def require_optimizer(saved: ForeignState) -> None:
    """Raise CheckpointError for weights alone: our checkpoint is a whole training state."""
    if OPTIMIZER not in saved.values:
        raise CheckpointError(
            f"{Path(saved.place).name} has no optimizer state: our checkpoint is a whole training state",
            hint="write the weights alone with --weights safetensors, and load them with the model",
        )


def _split(
    content: Mapping[str, Any], model_key: str | None, path: Path
) -> tuple[dict[str, PiecedTensor], dict[str, Any]]:
    """The model's tensors by plain name, and everything else."""
    if model_key is None and _is_state_dict(content):
        return _named_weights(content), {}
    found = [key for key, part in content.items() if isinstance(part, Mapping) and _is_state_dict(part)]
    if model_key is None:
        known = [key for key in _MODEL_KEYS if key in found]
        model_key = found[0] if len(found) == 1 else known[0] if len(known) == 1 else None
    if model_key is None or model_key not in found:
        raise CheckpointError(
            f"{path.name} has {'no' if not found else 'several'} parts that look like a model's state dict",
            hint="name it: --model-key KEY, model_key=…" if found else "save model.state_dict()",
            keys=[str(key) for key in content],
            candidates=[str(key) for key in found],
        )
    return _named_weights(content[model_key]), {key: part for key, part in content.items() if key != model_key}


def _is_state_dict(part: Mapping[Any, Any]) -> bool:
    """Names to tensors, perhaps with the extra state of modules among them."""
    tensors = {key for key, value in part.items() if _is_tensor(value)}
    others = [key for key in part if key not in tensors]
    return bool(tensors) and all(isinstance(key, str) for key in part) and all("_extra_state" in key for key in others)


def _is_optimizer(part: Any) -> bool:
    return isinstance(part, Mapping) and "state" in part and "param_groups" in part


def plain_torch_name(name: str) -> str:
    """A parameter's name without what FSDP, torch.compile and activation checkpointing add; DDP's `module.` stays."""
    return _WRAPPERS.sub("", name)


def _named_weights(part: Mapping[str, Any]) -> dict[str, PiecedTensor]:
    if any("_flat_param" in name or "flat_param" in name.rpartition(".")[2] for name in part):
        raise CheckpointError(
            "the checkpoint has FSDP1's flat parameters (LOCAL_STATE_DICT), which have no names",
            hint="save with StateDictType.FULL_STATE_DICT or SHARDED_STATE_DICT",
        )
    found = {plain_torch_name(name): _pieced(value) for name, value in part.items() if _is_tensor(value)}
    if all(name.startswith("module.") for name in found):  # DDP
        found = {name.removeprefix("module."): value for name, value in found.items()}
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | PiecedTensor)


def _pieced(value: Any) -> PiecedTensor:
    if isinstance(value, PiecedTensor):
        return value
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
    return PiecedTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def _named_optimizer(
    optimizer: Mapping[str, Any], weights: Mapping[str, PiecedTensor], path: Path
) -> tuple[dict[str, PiecedTensor], dict[str, Any]]:
    """The optimizer's tensors by `parameter.entry`, and its groups and other values, all by the names of parameters."""
    groups = [dict(group) for group in _in_order(optimizer["param_groups"])]
    state = optimizer["state"]
    for group in groups:
        group["params"] = _in_order(group["params"])
    numbers = [number for group in groups for number in group["params"]]
    if all(isinstance(number, str) for number in numbers):
        plain_names = {number: plain_torch_name(number) for number in numbers}
        names = {
            number: name if name in weights else name.removeprefix("module.") for number, name in plain_names.items()
        }
    else:
        names = _names_by_order([group["params"] for group in groups], state, weights, path)
    unknown = [name for name in names.values() if name not in weights]
    if unknown:
        raise CheckpointError(
            f"{path.name}: the optimizer has {unknown[0]}, which the model does not", hint="name the model: --model-key"
        )
    tensors: dict[str, PiecedTensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for number, name in names.items():
        for entry, value in state.get(number, {}).items():
            if _is_tensor(value) or entry == "step":
                tensors[f"{name}.{entry}"] = _pieced(value)
            elif value is not None:
                plain.setdefault(name, {})[entry] = value
    settings = [plain_settings({key: value for key, value in group.items() if key != "params"}) for group in groups]
    held = [[names[number] for number in group["params"]] for group in groups]
    return tensors, {
        "param_groups": [{**one, "params": params} for one, params in zip(settings, held, strict=True)],
        "plain": plain,
    }


def _in_order(part: Any) -> list[Any]:
    """A list, also one that was flattened into a dict of positions."""
    return [part[key] for key in sorted(part, key=int)] if isinstance(part, Mapping) else list(part)


def _names_by_order(
    groups: Sequence[Sequence[int]], state: Mapping[Any, Any], weights: Mapping[str, PiecedTensor], path: Path
) -> dict[int, str]:
    """Number to name: the parameters in the model's order. Raises CheckpointError if that leaves a choice."""
    names = [name for name, one in weights.items() if one.dtype.is_floating_point and not name.endswith(_BUFFERS)]
    numbers = [number for group in groups for number in group]

    def fits(number: int, name: str) -> bool:
        kept = [value.shape for value in state.get(number, {}).values() if hasattr(value, "shape") and value.shape]
        return all(tuple(shape) == weights[name].shape for shape in kept)

    if len(names) == len(numbers) and sorted(numbers) == list(range(len(numbers))):
        in_order = dict(zip(sorted(numbers), names, strict=True)) if len(groups) == 1 else None
        if in_order is not None and all(fits(number, name) for number, name in in_order.items()):
            return in_order
    if len(groups) == 1:
        first, last = _matched(numbers, names, fits), _matched(numbers[::-1], names[::-1], fits)
        if first is not None and first == last:
            return first
    raise CheckpointError(
        f"{path.name}: the optimizer counts its {len(numbers)} parameters, and their order does not say which of the"
        f" model's {len(names)} tensors they are",
        hint="save with torch.distributed.checkpoint.state_dict.get_state_dict, which keeps names; or take the weights",
    )


def _matched(numbers: Sequence[int], names: Sequence[str], fits: Any) -> dict[int, str] | None:
    """Numbers given to names as early as possible; None if some are left."""
    found: dict[int, str] = {}
    waiting = list(numbers)
    for name in names:
        if waiting and fits(waiting[0], name):
            found[waiting.pop(0)] = name
    return None if waiting else found


def _read_all(value: Any) -> Any:
    """The script's own values, with their tensors."""
    if isinstance(value, PiecedTensor):
        return value.read()
    if isinstance(value, Mapping):
        return {key: _read_all(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_read_all(part) for part in value)
    return value
