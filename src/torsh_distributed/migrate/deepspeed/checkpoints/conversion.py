"""What to do with a checkpoint of DeepSpeed: load it into an Engine, keep it as a checkpoint of ours, or its weights.

Every rank calls `load_deepspeed` and reads what its own part of the plan needs. The other two run in one process.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.checkpoint.checkpoint_manager import CheckpointManager
from torsh_distributed.checkpoint.files.checkpoint_directory import cannot_write
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.errors import CheckpointError, SerializationError
from torsh_distributed.migrate.deepspeed.checkpoints.deepspeed_state import (
    CheckpointFacts,
    DeepSpeedState,
    open_checkpoint,
)
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER, HeldState, SavedTensor, StoredOptimizer
from torsh_distributed.parallel.state.held_tensors import HeldTensor, layout_of, whole_runs
from torsh_distributed.parallel.weights.tensor_files import TensorFiles
from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats that weights are written in."""
_SHARD_BYTES = 5 * 10**9


def load_deepspeed(
    engine: Engine,
    source: str | Path,
    tag: str | None = None,
    *,
    model_only: bool = False,
    strict: bool = True,
    inert: Sequence[str] = (),
) -> CheckpointFacts:
    """Load a checkpoint of DeepSpeed into an Engine, under any plan and at any world size; every rank calls this.

    The optimizer must have the parameters that it had; in other groups it keeps its own settings. With `model_only`,
    weights and buffers alone. Returns what the checkpoint says besides: steps, the script's client state, the config.
    """
    saved = open_checkpoint(source, tag, with_optimizer=not model_only, inert=inert)
    mine = engine.strategy.held_state(engine.optimizer)
    if not model_only:
        _fit_groups(saved, mine.values[OPTIMIZER]["param_groups"])
    if isinstance(engine.optimizer, StoredOptimizer):
        # An optimizer with fp32 masters of its own: they are the weights, before these are rounded below.
        start = f"{MODEL}."
        weights = [name for name in saved.tensors if name.startswith(start)]
        saved.alias({f"{OPTIMIZER}.state.{name.removeprefix(start)}.master": name for name in weights})
    dtypes = {held.name: held.dtype for held in mine.tensors}
    for name, kind in saved.tensors.items():
        # fp32 weights are rounded to what the model has; only names and shapes must agree.
        saved.tensors[name] = SavedTensor(kind.shape, dtypes.get(name, kind.dtype)) if name.startswith(MODEL) else kind
    engine.checkpoints.load_from(saved, strict=strict, model_only=model_only)
    return saved.facts


def convert_checkpoint(
    source: str | Path, directory: str | Path, tag: str | None = None, *, inert: Sequence[str] = ()
) -> Path:
    """Write a checkpoint of DeepSpeed as one of ours, which `engine.load` reads under any plan; returns its directory.

    The script's client state is kept under `client_state`, as far as it is plain values.
    """
    saved = open_checkpoint(source, tag, inert=inert)
    values: dict[str, Any] = {**saved.values, "client_state": _plain_values(saved.facts.client_state)}
    tensors = [_held(saved, name, kind) for name, kind in saved.tensors.items()]
    with CheckpointManager(directory) as manager:
        step = saved.facts.global_steps
        # No rank had this place: an Engine restores its own part of the values only where it was saved.
        manager.save_held(step, HeldState(tensors, values), "imported", own={"place": None, "strategy": {}})
        manager.wait_for_commit()
        return manager.directory.step_path(step)


def fp32_weights(
    source: str | Path, tag: str | None = None, *, exclude_frozen: bool = False, inert: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The whole model in fp32, by name: what DeepSpeed's `get_fp32_state_dict_from_zero_checkpoint` returns."""
    saved = open_checkpoint(source, tag, with_optimizer=exclude_frozen, inert=inert)
    names = [name for name in saved.tensors if name.startswith(f"{MODEL}.")]
    if exclude_frozen:
        trained = {name for group in saved.values[OPTIMIZER]["param_groups"] for name in group["params"]}
        frozen = {name for name in names if name.removeprefix(f"{MODEL}.") not in trained}
        names = [name for name in names if name not in frozen]
    return {name.removeprefix(f"{MODEL}."): saved.whole(name) for name in names}


def write_weights(
    source: str | Path,
    out: str | Path,
    tag: str | None = None,
    *,
    file_format: str = "safetensors",
    dtype: str = "fp32",
    shard_bytes: int = _SHARD_BYTES,
    inert: Sequence[str] = (),
) -> list[Path]:
    """Write the model's weights as DeepSpeed's zero_to_fp32.py does: safetensors, or `bin` for torch.save.

    safetensors files are as `from_pretrained` reads them, with an index if there are several; `bin` is one file,
    pytorch_model.bin. Returns the files. The directory must be empty or new.
    """
    directory = Path(out)
    if dtype not in DTYPES:
        raise CheckpointError(f"weights are written as {', '.join(DTYPES)}, not as {dtype}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty: nothing is overwritten", hint="name a new directory")
    saved = open_checkpoint(source, tag, with_optimizer=False, inert=inert)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if file_format == "bin":
            return _write_bin(saved, directory, DTYPES[dtype])
        return _write_safetensors(saved, directory, DTYPES[dtype], shard_bytes)
    except OSError as error:
        raise cannot_write(Path(error.filename or directory), error) from error


def _held(saved: DeepSpeedState, name: str, kind: SavedTensor) -> HeldTensor:
    layout = layout_of(kind.shape, whole_runs(kind.shape), kind.shape)
    return HeldTensor(name, layout, kind.dtype, partial(saved.whole, name))


def _write_bin(saved: DeepSpeedState, directory: Path, dtype: torch.dtype) -> list[Path]:
    weights = {
        name.removeprefix(f"{MODEL}."): _cast(saved.whole(name), dtype)
        for name in saved.tensors
        if name.startswith(f"{MODEL}.")
    }
    unfinished = directory / ".pytorch_model.bin"
    torch.save(weights, unfinished)
    unfinished.replace(directory / "pytorch_model.bin")
    return [directory / "pytorch_model.bin"]


def _write_safetensors(saved: DeepSpeedState, directory: Path, dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    names = [name.removeprefix(f"{MODEL}.") for name in saved.tensors if name.startswith(f"{MODEL}.")]
    written = directory / ".export"
    written.mkdir()
    try:
        files = TensorFiles(written, names, max_bytes=shard_bytes)
        for name in names:
            files.write(name, _cast(saved.whole(f"{MODEL}.{name}"), dtype).contiguous())
        files.finish(directory)
        written.rmdir()
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    return sorted(directory.glob("*.safetensors"))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    whole = tensor.detach()
    return whole.to(dtype) if whole.is_floating_point() else whole


def _fit_groups(saved: DeepSpeedState, mine: Sequence[Mapping[str, Any]]) -> None:
    """Give the saved groups this optimizer's order and keys: the state itself goes by name.

    Settings that it does not have, such as those of DeepSpeed's own Adam, are left out.
    """
    groups: list[dict[str, Any]] = saved.values[OPTIMIZER]["param_groups"]
    if [set(group["params"]) for group in groups] != [set(group["params"]) for group in mine]:
        everything = [name for group in groups for name in group["params"]]
        if set(everything) == {name for group in mine for name in group["params"]}:
            _log.warning("the optimizer divides the same parameters into other groups: it keeps its own settings")
            groups[:] = [dict(group) for group in mine]
        return  # else it is refused, with the numbers of both
    for group, own in zip(groups, mine, strict=True):
        known = {key: value for key, value in group.items() if key in own}
        group.clear()
        group.update({**own, **known, "params": list(own["params"])})


def _plain_values(values: Any) -> dict[str, Any]:
    """What can be kept without pickle; the rest is named in the log."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        try:
            serialize(value)
        except (SerializationError, TypeError, ValueError):
            _log.warning("client_state[%r] is left out: it is not made of plain values", key)
            continue
        kept[str(key)] = value
    return kept
