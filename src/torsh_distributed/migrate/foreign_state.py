"""A checkpoint of another library as a state: any plan can load it, keep it as our checkpoint or write its weights.

Whole tensors by name, read as they are needed: `model.head.weight`, `optimizer.state.head.weight.exp_avg`.

Files of torch.save from another library, read without running anything of theirs.
torch's `weights_only` reading builds plain values and tensors alone. The few classes of DeepSpeed that its files name
are on a list here, and each is read as an inert record: nothing of DeepSpeed is imported, and any other name in a file
is an error. Never bare pickle.
"""

from __future__ import annotations

import logging
import math
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torsh_distributed.checkpoint.checkpoint_manager import CheckpointManager
from torsh_distributed.checkpoint.files.checkpoint_directory import cannot_write
from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata
from torsh_distributed.checkpoint.files.tensor_index import IndexedTensor, StoredBox, TensorIndex
from torsh_distributed.checkpoint.loading.saved_snapshot import SavedSnapshot
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.errors import CheckpointError, SerializationError, first_line
from torsh_distributed.parallel.state.held_state import MODEL, OPTIMIZER, HeldState, SavedTensor, StoredOptimizer
from torsh_distributed.parallel.state.held_tensors import HeldTensor, layout_of, whole_runs
from torsh_distributed.parallel.weights.tensor_files import TensorFiles
from torsh_distributed.train.engine import Engine
from torsh_distributed.unreadable_data import reason_of, unreadable_as


class InertRecord:
    """What an object of another library held: its attributes, and no behaviour. Made by reading a file."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute of the object."""
        return self.__dict__.get(name, default)


KNOWN_NAMES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "argparse.Namespace",
    "types.SimpleNamespace",
)
"""Classes that DeepSpeed's files name, and those in which training scripts keep their arguments."""
_STAGES = "deepspeed.runtime.zero.config.ZeroStageEnum"


def load_safely(path: Path, *, inert: Iterable[str] = ()) -> Any:
    """The value in a file that torch.save wrote, with tensors mapped, not read.

    `inert`: further classes by full name that the file may name; they become records too. Raises CheckpointError for a
    file that is missing, damaged, or names anything else.
    """
    # Two names of one class may not share an object: torch finds the name of an allowed object by its identity.
    records = [(type("InertRecord", (InertRecord,), {}), name) for name in (*KNOWN_NAMES, *inert)]
    allowed: list[Any] = [*records, (int, _STAGES)]
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{path} is not a file")
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}", hint="copy the whole directory of the checkpoint") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} names what a checkpoint does not hold, and is not read: {_names(path, error)}",
            hint="if you trust the file and these are plain records of your script, name them: inert=(…), --inert NAME",
            path=str(path),
        ) from error
    except Exception as error:  # a forged pickle may fail in any of torch's lines
        raise CheckpointError(
            f"{path.name} is damaged, or no file of torch.save: {reason_of(error)}",
            hint="copy the file again from where it was stored",
            path=str(path),
        ) from error


def _names(path: Path, error: Exception) -> str:
    """What the file asks for beyond the list, as far as that can be found out without running it."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # as above: then torch's own words have to do
        unsafe = []
    others = [name for name in unsafe if name not in (*KNOWN_NAMES, _STAGES)]
    return ", ".join(others) if others else first_line(error)


_log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats that weights are written in."""
_COPY_AGAIN = "copy the checkpoint again from where it was stored"
SHARD_BYTES = 5 * 10**9
"""How large a file of weights becomes."""


@dataclass(frozen=True)
class PiecedTensor:
    """A whole tensor, put together from pieces when it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


class ForeignState(SavedSnapshot):
    """A checkpoint of another library to load from, by the names of the model's parameters."""

    def __init__(
        self,
        place: Path,
        tensors: Mapping[str, PiecedTensor],
        values: Mapping[str, Any],
        *,
        step: int,
        num_ranks: int = 1,
        client_state: Mapping[str, Any],
    ) -> None:
        self.client_state = client_state
        """What the script had saved beside its model and optimizer."""
        self._pieced = dict(tensors)
        metadata = CheckpointMetadata(step=step, world_size=num_ranks, reason="imported")
        index = TensorIndex({name: _indexed(name, one) for name, one in tensors.items()})
        num_bytes = sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors.values())
        super().__init__(str(place), metadata, index, values, num_bytes=num_bytes)

    @override
    def whole(self, name: str) -> Tensor:
        with unreadable_as(CheckpointError, f"{name} in {self.place} cannot be read", hint=_COPY_AGAIN):
            return self._pieced[name].read()

    @property
    def weights(self) -> list[str]:
        """The names of the model's tensors."""
        return [name.removeprefix(f"{MODEL}.") for name in self.tensors if name.startswith(f"{MODEL}.")]

    @override
    def own_values(self, rank: int) -> Any:
        return None

    @override
    def read_bytes(self, stored: StoredBox, begin: int, into: memoryview) -> None:
        one = self._pieced[stored.file]
        plain = self.whole(stored.file).detach().to(one.dtype).contiguous().flatten().view(torch.uint8)
        into[:] = memoryview(plain[begin : begin + len(into)].numpy().data)


def load_foreign(engine: Engine, saved: ForeignState, *, model_only: bool = False, strict: bool = True) -> None:
    """Load a state into an Engine, under any plan and at any world size; every rank calls this."""
    mine = engine.strategy.held_state(engine.optimizer)
    if not model_only:
        _fit_groups(saved, mine.values[OPTIMIZER]["param_groups"])
    if isinstance(engine.optimizer, StoredOptimizer):
        # An optimizer with fp32 masters of its own: they are the weights, before these are rounded below.
        saved.alias({f"{OPTIMIZER}.state.{name}.master": f"{MODEL}.{name}" for name in saved.weights})
    dtypes = {held.name: held.dtype for held in mine.tensors}
    for name, kind in saved.tensors.items():
        # Weights are rounded to what the model has; only names and shapes must agree.
        saved.tensors[name] = SavedTensor(kind.shape, dtypes.get(name, kind.dtype)) if name.startswith(MODEL) else kind
    engine.checkpoints.load_from(saved, strict=strict, model_only=model_only)


def keep_foreign(saved: ForeignState, directory: str | Path) -> Path:
    """Write a state as our checkpoint, which `engine.load` reads under any plan; returns its directory.

    The script's client state is kept under `client_state`, as far as it is plain values.
    """
    values: dict[str, Any] = {**saved.values, "client_state": _plain_values(saved.client_state)}
    tensors = [_held(saved, name, kind) for name, kind in saved.tensors.items()]
    with CheckpointManager(directory) as manager:
        step = saved.metadata.step
        # No rank had this place: an Engine restores its own part of the values only where it was saved.
        manager.save_held(step, HeldState(tensors, values), "imported", own={"place": None, "strategy": {}})
        manager.wait_for_commit()
        return manager.directory.step_path(step)


def write_foreign_weights(
    saved: ForeignState,
    out: str | Path,
    *,
    file_format: str = "safetensors",
    dtype: str = "fp32",
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the model's weights: safetensors, or `bin` for torch.save; returns the files.

    safetensors files are as `from_pretrained` reads them, with an index if there are several; `bin` is one file,
    pytorch_model.bin. The directory must be empty or new.
    """
    directory = Path(out)
    if dtype not in DTYPES:
        raise CheckpointError(f"weights are written as {', '.join(DTYPES)}, not as {dtype}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} is not empty: nothing is overwritten", hint="name a new directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if file_format == "bin":
            return _write_bin(saved, directory, DTYPES[dtype])
        return _write_safetensors(saved, directory, DTYPES[dtype], shard_bytes)
    except OSError as error:
        raise cannot_write(Path(error.filename or directory), error) from error


def _held(saved: ForeignState, name: str, kind: SavedTensor) -> HeldTensor:
    layout = layout_of(kind.shape, whole_runs(kind.shape), kind.shape)
    return HeldTensor(name, layout, kind.dtype, partial(saved.whole, name))


def _write_bin(saved: ForeignState, directory: Path, dtype: torch.dtype) -> list[Path]:
    weights = {name: _cast(saved.whole(f"{MODEL}.{name}"), dtype) for name in saved.weights}
    unfinished = directory / ".pytorch_model.bin"
    torch.save(weights, unfinished)
    unfinished.replace(directory / "pytorch_model.bin")
    return [directory / "pytorch_model.bin"]


def _write_safetensors(saved: ForeignState, directory: Path, dtype: torch.dtype, shard_bytes: int) -> list[Path]:
    written = directory / ".export"
    written.mkdir()
    try:
        files = TensorFiles(written, saved.weights, max_bytes=shard_bytes)
        for name in saved.weights:
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


def _fit_groups(saved: ForeignState, mine: Sequence[Mapping[str, Any]]) -> None:
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


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's group as plain values: what our checkpoint keeps."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
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


def _indexed(name: str, one: PiecedTensor) -> IndexedTensor:
    """One box: the whole tensor, in a file of its own name."""
    box = StoredBox((0,) * len(one.shape), one.shape, name, 0, 0, 0)
    return IndexedTensor(str(one.dtype).removeprefix("torch."), one.shape, (box,))
