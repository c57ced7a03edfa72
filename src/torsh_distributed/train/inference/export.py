"""Writes a trained model as safetensors files that `from_pretrained` loads, tensor by tensor, from any strategy.

Every rank takes part, because parts of a tensor are joined; the first one writes. At most one whole tensor exists at a
time. What was written under other names is renamed at the end, so a directory never looks complete before it is.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import CheckpointError, IoError
from torsh_distributed.parallel.models.same_model import user_class
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.parallel.weights.tensor_files import TensorFiles

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
