"""The tensors that a path holds: one safetensors file, or a directory as Hugging Face writes it."""

from __future__ import annotations

import json
from pathlib import Path

from torsh_distributed.errors import CheckpointError, InvalidArgument
from torsh_distributed.parallel.weights.safetensors_format import FileTensor, read_header
from torsh_distributed.unreadable_data import unreadable_as

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def stored_tensors(path: str | Path) -> dict[str, FileTensor]:
    """The tensors at `path` by name: a file, a directory with an index, or one with any safetensors files.

    Reads headers only. A name in two files, a file that the index names and that is missing, or a tensor that is not
    where the index says raise CheckpointError.
    """
    place = Path(path)
    if place.is_file():
        return read_header(place)
    if not place.is_dir():
        raise InvalidArgument(
            f"weights: there is no file or directory {place}",
            hint="give a local directory with safetensors files; download a model from a hub first",
        )
    if (place / INDEX).is_file():
        return _by_index(place)
    files = [place / SINGLE] if (place / SINGLE).is_file() else sorted(place.glob("*.safetensors"))
    if not files:
        held = sorted(one.name for one in place.iterdir())[:8]
        raise InvalidArgument(
            f"weights: {place} holds no safetensors file",
            hint="convert it: AutoModel.from_pretrained(path).save_pretrained(new_path)",
            holds=held,
        )
    found: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in found:
                raise CheckpointError(
                    f"{name} is in two files: {found[name].file.name} and {file.name}",
                    hint=f"write {INDEX}, or leave one of the files out",
                )
            found[name] = tensor
    return found


def _weight_map(place: Path) -> dict[str, str]:
    """Tensor to file, as the index says; a name that leads out of the directory is refused before it is looked at.

    A link in the directory is followed: the hub's own cache consists of them.
    """
    with unreadable_as(CheckpointError, f"{place / INDEX} is not an index of weights", hint="download it again"):
        where: dict[str, str] = json.loads((place / INDEX).read_bytes())["weight_map"]
        outside = [name for name in where.values() if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise CheckpointError(
            f"{place / INDEX} names {outside[0]!r}, which is not a safetensors file beside it",
            hint="do not load it: an index of somebody else's may point at files of yours",
            names=len(outside),
        )
    return where


def _by_index(place: Path) -> dict[str, FileTensor]:
    where = _weight_map(place)
    missing = sorted({name for name in where.values() if not (place / name).is_file()})
    if missing:
        raise CheckpointError(
            f"{place} is not complete: {', '.join(missing)} missing",
            hint="copy or download these files",
            files=len(set(where.values())),
        )
    headers = {name: read_header(place / name) for name in sorted(set(where.values()))}
    astray = [name for name, file in where.items() if name not in headers[file]]
    if astray:
        raise CheckpointError(
            f"{INDEX} says that {where[astray[0]]} has {astray[0]}, and it has not",
            hint="the files are of different saves: copy them all from one",
            tensors=len(astray),
        )
    return {name: headers[file][name] for name, file in where.items()}
