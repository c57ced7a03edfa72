"""Writes tensors one by one into safetensors files of limited size, with an index, as `from_pretrained` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.parallel.weights.safetensors_format import CODES, DATA_STARTS, header_bytes, room_for
from torsh_distributed.parallel.weights.weight_files import INDEX, SINGLE


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
