"""Which files a checkpoint of DeepSpeed has: the newest tag, and the shards of model and optimizer under it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from torsh_distributed.errors import CheckpointError

_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_SHARD = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_EXPERT = re.compile(r"layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt")


@dataclass(frozen=True)
class ShardFiles:
    """The files of one tag. Keys: the model-parallel rank, then the data-parallel rank."""

    directory: Path
    models: dict[int, dict[int, Path]] = field(default_factory=dict)
    """Stages 0 to 2 have one file for each model-parallel rank, under data-parallel rank 0; stage 3 has one each."""
    optimizers: dict[int, dict[int, Path]] = field(default_factory=dict)
    layers: dict[int, Path] = field(default_factory=dict)
    """Of a pipeline: one file for each layer."""
    universal: Path | None = None
    """The directory with a folder for each parameter, of a universal checkpoint."""


def find_files(source: Path, tag: str | None = None) -> ShardFiles:
    """The files of a tag, of the newest one if none is named; `source` may be the tag's own directory.

    Raises CheckpointError if there is none, if a shard is missing, or if the shards cannot be put together.
    """
    directory = _tag_directory(source, tag)
    found = ShardFiles(directory, universal=directory / "zero" if (directory / "zero").is_dir() else None)
    for path in sorted(directory.iterdir()):
        if _EXPERT.fullmatch(path.name):
            raise CheckpointError(
                f"{directory.name} has experts in files of their own ({path.name}), which are not read",
                hint="convert it with DeepSpeed's ds_to_universal.py, and read the universal checkpoint",
            )
        if name := _MODEL.fullmatch(path.name):
            found.models.setdefault(int(name[1]), {})[0] = path
        elif name := _MODEL_SHARD.fullmatch(path.name):
            found.models.setdefault(int(name[2]), {})[int(name[1])] = path
        elif name := _OPTIMIZER_SHARD.fullmatch(path.name):
            found.optimizers.setdefault(int(name[2]), {})[int(name[1])] = path
        elif name := _LAYER.fullmatch(path.name):
            found.layers[int(name[1])] = path
    if not found.models and any(directory.glob("step-*")):
        raise CheckpointError(
            f"{directory} was saved under `torsh run --as deepspeed`: it is a checkpoint of this library already",
            hint=f"load it as it is, or write its weights: torsh checkpoint export {directory} weights --safetensors",
        )
    if not found.models:
        raise CheckpointError(
            f"{directory} is not a checkpoint of DeepSpeed: it has no *_model_states.pt",
            hint="name the directory that save_checkpoint was given, or one of its tags",
        )
    _require_no_gap(found)
    return found


def _tag_directory(source: Path, tag: str | None) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"there is no directory {source}", hint="name what save_checkpoint was given")
    if tag is not None:
        if Path(tag).name != tag:
            raise CheckpointError(f"{tag!r} is not a tag", hint="a tag is the name of one directory")
        if not (source / tag).is_dir():
            raise CheckpointError(f"{source} has no tag {tag}", hint=f"it has: {', '.join(_tags(source)) or 'none'}")
        return source / tag
    for name in ("latest", "latest_universal"):
        if (source / name).is_file():
            newest = (source / name).read_text(errors="replace").strip()
            if Path(newest).name == newest and len(newest) <= 200 and (source / newest).is_dir():
                return source / newest
            raise CheckpointError(
                f"{source / name} names {newest[:200]!r}, which is not there",
                hint=f"name a tag: {', '.join(_tags(source)) or 'there is none'}",
            )
    return source


def _tags(source: Path) -> list[str]:
    return sorted(path.name for path in source.iterdir() if path.is_dir() and any(path.glob("*_model_states.pt")))


def _require_no_gap(found: ShardFiles) -> None:
    for what, files in (("model", found.models), ("optimizer", found.optimizers)):
        for rank, shards in files.items():
            missing = [number for number in range(max(shards) + 1) if number not in shards]
            if missing:
                raise CheckpointError(
                    f"{found.directory.name} lacks the {what} shard of data-parallel rank {missing[0]}"
                    f" (model-parallel rank {rank}): it has {len(shards)} of {max(shards) + 1}",
                    hint="copy it from the node that wrote it: every rank saves its own shard",
                )
        absent = [rank for rank in range(max(files, default=-1) + 1) if rank not in files]
        if absent:
            raise CheckpointError(
                f"{found.directory.name} lacks the {what} shards of model-parallel rank {absent[0]}",
                hint="copy them from the node that wrote them: every rank saves its own shard",
            )
