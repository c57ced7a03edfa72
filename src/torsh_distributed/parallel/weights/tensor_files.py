"""Writes tensors one by one into safetensors files of limited size, with an index, as `from_pretrained` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError, InvalidArgument
from torsh_distributed.parallel.weights.safetensors_format import (
    CODES,
    DATA_STARTS,
    FileTensor,
    header_bytes,
    read_header,
    room_for,
)
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


class TensorFiles:
    """Tensors into files of limited size, one after another; the room for a header is kept free until its file ends.

    `names` are those of all tensors that may come; the files are written in `directory` and get their names at the end.
    """

    def __init__(self, directory: Path, names: list[str], *, max_bytes: int) -> None:
        self._directory, self._left, self._max_bytes = directory, names, max_bytes
        self._files: list[tuple[Path, dict[str, dict[str, Any]]]] = []
        self._opened: Any = None
        self._room = 0
        self._position = 0
        self.total_bytes = 0
        """Of the tensors written."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Append a tensor, in a new file if this one is full."""
        value = tensor.detach().to("cpu").contiguous()
        if value.dtype not in CODES:
            raise CheckpointError(f"{name} is {value.dtype}, which safetensors does not know", hint="convert it first")
        if self._opened is None or (self._position and self._position + value.nbytes > self._max_bytes):
            self._next()
        _, header = self._files[-1]
        header[name] = {
            "dtype": CODES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [self._position, self._position + value.nbytes],
        }
        if value.numel():
            self._opened.write(value.reshape(-1).view(torch.uint8).numpy())
        self._position += value.nbytes
        self.total_bytes += value.nbytes

    def _next(self) -> None:
        self._end_file()
        written = {name for _, header in self._files for name in header}
        self._room = room_for([name for name in self._left if name not in written])
        path = self._directory / f"{len(self._files):05d}"
        self._files.append((path, {}))
        self._opened = path.open("wb")
        self._opened.seek(DATA_STARTS + self._room)
        self._position = 0

    def _end_file(self) -> None:
        if self._opened is None:
            return
        self._opened.seek(0)
        self._opened.write(header_bytes(self._files[-1][1], length=self._room))
        self._opened.close()
        self._opened = None

    def finish(self, into: Path) -> None:
        """Give the files their names, with an index if there are several."""
        self._end_file()
        for old in [*into.glob("model*.safetensors"), into / INDEX]:
            old.unlink(missing_ok=True)
        if len(self._files) == 1:
            self._files[0][0].rename(into / SINGLE)
            return
        where: dict[str, str] = {}
        for number, (path, header) in enumerate(self._files, 1):
            name = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(into / name)
            where.update(dict.fromkeys(header, name))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(where.items()))}
        (into / INDEX).write_text(json.dumps(index, indent=2) + "\n")
