"""Writes a trained model as safetensors files that `from_pretrained` loads, tensor by tensor, from any strategy.

Every rank takes part, because parts of a tensor are joined; the first one writes. At most one whole tensor exists at a
time. What was written under other names is renamed at the end, so a directory never looks complete before it is.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import CheckpointError, IoError
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.parallel.weights.safetensors_format import CODES, DATA_STARTS, header_bytes, room_for
from torsh_distributed.parallel.weights.weight_files import INDEX, SINGLE

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def export_model(strategy: Strategy, directory: str | Path, *, dtype: str | None, max_file_gb: float) -> None:
    """Write the model to `directory`; every rank calls this, and all raise if the first could not write.

    With a transformers model also `config.json` and the generation config; of a PEFT model the adapter alone.
    """
    path = Path(directory)
    model = strategy.whole_model
    is_writer = not dist.is_initialized() or process_group.rank() == 0
    if hasattr(model, "peft_config"):
        _export_adapter(strategy, model, path, dtype, is_writer)
        return
    names = list(strategy.state_names())
    doubled = strategy.shared_names()
    failure: Exception | None = None
    series: TensorFiles | None = None
    partial = path / ".export"
    with fail_together(f"export the model to {path}", dist.group.WORLD if dist.is_initialized() else None):
        if is_writer:
            failure = _attempt(lambda: _clear(partial))
            series = TensorFiles(partial, names, max_bytes=int(max_file_gb * 2**30))
        for name, value in strategy.whole_tensors():
            if not is_writer or failure is not None or name in doubled or not isinstance(value, Tensor):
                continue  # but every rank has joined the tensor: the others wait for this one
            assert series is not None
            converted = _converted(value, dtype)
            failure = _attempt(lambda: series.write(name, converted))  # noqa: B023 (called at once)
        if is_writer and failure is None:
            assert series is not None
            failure = _attempt(lambda: _finish(series, model, path, dtype))
        if is_writer and failure is not None:
            with suppress(OSError):
                shutil.rmtree(partial)
            if isinstance(failure, OSError):
                raise IoError(f"the export to {path} failed: {failure}", operation="export") from failure
            raise failure


def _attempt(action: Callable[[], object]) -> Exception | None:
    """What the action raised: the first rank must not leave while the others join tensors with it."""
    try:
        action()
    except (OSError, CheckpointError) as error:
        return error
    return None


def _clear(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _finish(series: TensorFiles, model: nn.Module, path: Path, dtype: str | None) -> None:
    series.finish(path)
    shutil.rmtree(path / ".export")
    config = copy.deepcopy(getattr(model, "config", None))
    if config is not None and callable(getattr(config, "save_pretrained", None)):
        config.architectures = [user_class(model).__name__]
        config.dtype = _DTYPES[dtype] if dtype else next(model.parameters()).dtype
        config.save_pretrained(path)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(path)


def _converted(value: Tensor, dtype: str | None) -> Tensor:
    return value.to(_DTYPES[dtype]) if dtype and value.is_floating_point() else value


def _export_adapter(strategy: Strategy, model: nn.Module, path: Path, dtype: str | None, is_writer: bool) -> None:
    """The trained part of a PEFT model, as `PeftModel.from_pretrained` loads it."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    kept = {
        name: _converted(value, dtype).detach().to("cpu", copy=True)
        for name, value in strategy.whole_tensors()
        if is_writer and (name in trained or "lora_" in name or "modules_to_save" in name)
    }
    with fail_together(f"export the adapter to {path}", dist.group.WORLD if dist.is_initialized() else None):
        if is_writer:
            failure = _attempt(lambda: model.save_pretrained(path, state_dict=kept))  # type: ignore[operator]  # PEFT's
            if failure is not None:
                raise IoError(f"the export to {path} failed: {failure}", operation="export") from failure


def user_class(model: nn.Module) -> type[nn.Module]:
    """The user's own class: FSDP2 gives a sharded model a class derived from it."""
    from torch.distributed.fsdp import FSDPModule

    return next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule) and issubclass(one, nn.Module))
