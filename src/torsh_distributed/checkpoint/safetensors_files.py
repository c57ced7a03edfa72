"""A checkpoint's model as safetensors files, as `from_pretrained` reads them, and back, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.checkpoint.files.block_hashes import Progress
from torsh_distributed.checkpoint.files.checkpoint_directory import cannot_write
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.checkpoint.run_facts import PRETRAINED
from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.state.held_state import HeldState, SavedTensor
from torsh_distributed.parallel.state.held_tensors import HeldTensor, layout_of, whole_runs
from torsh_distributed.parallel.weights.reading import whole_tensor
from torsh_distributed.parallel.weights.safetensors_format import FileTensor
from torsh_distributed.parallel.weights.tensor_files import TensorFiles, stored_tensors
from torsh_distributed.unreadable_data import unreadable_as


def export(
    saved: SavedSnapshot, directory: Path, *, key: str = "model", shard_bytes: int, progress: Progress | None = None
) -> list[Path]:
    """Write the tensors under `key`, without it, in files of about `shard_bytes`; returns the files.

    Of a transformers model also `config.json` and the generation config, as they were when it was saved.
    """
    tensors = {name.removeprefix(f"{key}."): kind for name, kind in saved.tensors.items() if name.startswith(f"{key}.")}
    if not tensors:
        raise CheckpointError(f"{saved.place} has nothing under {key!r}", hint="name another one with --key")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty: nothing is overwritten", hint="name a new directory")
    facts = _pretrained(saved, key)
    shared = {} if facts is None else facts["shared"]
    written = directory / ".export"
    try:
        written.mkdir(parents=True)
        files = TensorFiles(written, list(tensors), max_bytes=shard_bytes)
        for name, kind in tensors.items():
            if name not in shared:
                files.write(name, saved.whole(f"{key}.{name}"))
                if progress is not None:
                    progress(torch.Size(kind.shape).numel() * kind.dtype.itemsize)
        files.finish(directory)
        written.rmdir()
        if facts is not None:
            _write_config(directory, facts, tensors)
    except OSError as error:
        shutil.rmtree(written, ignore_errors=True)
        raise cannot_write(Path(error.filename or directory), error) from error
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise
    return sorted(directory.glob("*.safetensors"))


def _pretrained(saved: SavedSnapshot, key: str) -> Mapping[str, Any] | None:
    """What was saved for `from_pretrained`, of the types that it is saved with; None if nothing was."""
    with unreadable_as(CheckpointError, f"{saved.place}: the model's config cannot be understood"):
        facts = saved.values.get(PRETRAINED, {}).get(key)
        if facts is None:
            return None
        texts = [facts["config"], facts["architecture"], *facts["shared"], *facts["shared"].values()]
        if not all(isinstance(one, str) for one in texts) or not isinstance(facts["generation"], str | None):
            raise TypeError("it is not text")
        if not isinstance(json.loads(facts["config"]), dict):
            raise TypeError("it is not a config")
        return {**facts}


def _write_config(directory: Path, facts: Mapping[str, Any], tensors: Mapping[str, SavedTensor]) -> None:
    config = json.loads(facts["config"])
    config["architectures"] = [facts["architecture"]]
    dtypes = [kind.dtype for kind in tensors.values() if kind.dtype.is_floating_point]
    if dtypes:
        config["dtype"] = str(dtypes[0]).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if facts["generation"] is not None:
        (directory / "generation_config.json").write_text(facts["generation"])


def model_in(path: Path, progress: Progress | None = None) -> HeldState:
    """The tensors of a safetensors file, or of a directory of them with or without an index, as a state to save.

    Headers are read now, each tensor when it is saved; `progress` is told then.
    """
    state = HeldState(values={"model": {}})
    for name, stored in stored_tensors(path).items():
        layout = layout_of(stored.shape, whole_runs(stored.shape), stored.shape)
        state.tensors.append(HeldTensor(f"model.{name}", layout, stored.dtype, partial(_read, stored, progress)))
    return state


def _read(stored: FileTensor, progress: Progress | None) -> Tensor:
    whole = whole_tensor(stored)
    if progress is not None:
        progress(whole.nbytes)
    return whole
