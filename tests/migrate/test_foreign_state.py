"""Files of another library: tensors and plain values come in, nothing runs, and what is refused is named."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.foreign_state import load_safely


class Ambush:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


CALLED: list[str] = []


def callback(text: str) -> str:
    """What a file asks to have called."""
    CALLED.append(text)
    return text


class Caller:
    """Calls a function of this module when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return callback, ("once",)


class ScriptRecord:
    """A class of a training script, kept in client state."""

    def __init__(self) -> None:
        self.layers = 3


@pytest.fixture
def theirs() -> Iterator[type]:
    """A class under DeepSpeed's name, there only while the file is written."""
    names = ["deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", "deepspeed.runtime.fp16.loss_scaler"]
    scaler = type("LossScaler", (), {"__module__": names[-1]})
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[names[-1]].__dict__["LossScaler"] = scaler
    yield scaler
    for name in names:
        sys.modules.pop(name, None)


def saved(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "states.pt"
    torch.save(value, path)
    return path


def test_tensors_and_plain_values_come_in(tmp_path: Path) -> None:
    value = {"a": torch.arange(3), "b": OrderedDict(c=torch.Size([2])), "d": [1, None, "x", 2.5, True]}
    found = load_safely(saved(tmp_path, value))
    assert torch.equal(found.pop("a"), value.pop("a"))  # type: ignore[arg-type]
    assert found == value


def test_a_class_of_deepspeed_is_a_record_without_deepspeed(tmp_path: Path, theirs: type) -> None:
    scaler = theirs()
    scaler.__dict__.update(cur_scale=8.0, dynamic=True)
    path = saved(tmp_path, {"loss_scaler": scaler})
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    found = load_safely(path)["loss_scaler"]
    assert (found.get("cur_scale"), found.get("dynamic"), found.get("none", 5)) == (8.0, True, 5)
    assert "deepspeed" not in sys.modules


def test_arguments_of_a_script_are_a_record(tmp_path: Path) -> None:
    found = load_safely(saved(tmp_path, {"args": argparse.Namespace(layers=2)}))["args"]
    assert found.get("layers") == 2
    assert not isinstance(found, argparse.Namespace)


def test_a_hostile_file_runs_nothing_and_is_refused_by_name(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    with pytest.raises(CheckpointError, match=r"names what a checkpoint .* posix.system"):
        load_safely(saved(tmp_path, {"module": Ambush(touched)}))
    bare = tmp_path / "bare.pt"
    bare.write_bytes(pickle.dumps(Ambush(touched), protocol=2))
    with pytest.raises(CheckpointError):
        load_safely(bare)
    assert not touched.exists()


def test_a_function_that_is_allowed_by_name_is_not_called(tmp_path: Path) -> None:
    """Naming it turns it into a record of what it would have been given."""
    found = load_safely(saved(tmp_path, Caller()), inert=[f"{callback.__module__}.callback"])
    assert found.args == ("once",)
    assert CALLED == []


def test_a_class_of_the_script_is_named_and_may_be_allowed(tmp_path: Path) -> None:
    path = saved(tmp_path, {"state": ScriptRecord()})
    full = f"{ScriptRecord.__module__}.ScriptRecord"
    with pytest.raises(CheckpointError, match=full) as caught:
        load_safely(path)
    assert "--inert" in str(caught.value)
    assert load_safely(path, inert=[full])["state"].get("layers") == 3


@pytest.mark.parametrize("content", [b"", b"no file of torch", b"PK\x03\x04broken"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "states.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"states\.pt"):
        load_safely(path)
    with pytest.raises(CheckpointError, match="there is no file"):
        load_safely(tmp_path / "absent.pt")
