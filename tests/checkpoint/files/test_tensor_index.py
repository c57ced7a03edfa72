"""The index of tensors: what a forger may write into it is found before a file is opened or memory is taken."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.block_hashes import record_of
from torsh_distributed.checkpoint.files.manifest import MANIFEST, MARKER, TENSORS, marker_for
from torsh_distributed.checkpoint.files.tensor_index import IndexedTensor, StoredBox, TensorIndex, item_bytes
from torsh_distributed.cli.checkpoint.commands import app
from torsh_distributed.errors import CheckpointError

FILES = {"__0_0.distcp": 10_000, "__1_0.distcp": 10_000}


def box(first: int, size: int, **fields: Any) -> StoredBox:
    given = {"offsets": (first, 0), "sizes": (size, 4), "file": "__0_0.distcp", "start": 0, "length": 900}
    return StoredBox(**{**given, "data_start": 100, **fields})


def read_back(*boxes: StoredBox, shape: tuple[int, ...] = (8, 4), dtype: str = "float32") -> TensorIndex:
    index = TensorIndex({"model.w": IndexedTensor(dtype, shape, boxes)})
    return TensorIndex.from_bytes(index.to_bytes(), FILES, is_compressed=False)


def test_a_sound_index_is_read_back() -> None:
    boxes = (box(0, 3), box(3, 5, file="__1_0.distcp", start=64))
    assert read_back(*boxes).tensors["model.w"].boxes == boxes


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([box(0, 8, file="../../private.txt")], "not a file of the checkpoint"),
        ([box(0, 8, file="/etc/passwd")], "not a file of the checkpoint"),
        ([box(0, 9)], "outside of its shape"),
        ([box(-1, 9)], "not a number"),
        ([box(0, 8, sizes=(8,))], "outside of its shape"),
        ([box(0, 8, start=9_500)], "not all in"),
        ([box(0, 8, length=200)], "not all in"),
        ([box(0, 8, start=-64)], "not a number"),
        ([box(0, 8, data_start=2**40)], "not all in"),
        ([box(0, 8, start=True)], "not a number"),
        ([box(0, 4), box(0, 4)], "each element of it once"),
        ([box(0, 4)], "each element of it once"),
        (
            # Two rows of four, cut more often across than along; one of the lower row is a line too high.
            [box(0, 6, offsets=(0, column), sizes=(6, 1)) for column in range(4)]
            + [box(6, 2, offsets=(6 - (column == 0), column), sizes=(2, 1)) for column in range(4)],
            "each element of it once",
        ),
    ],
)
def test_what_does_not_fit_the_files_is_refused(boxes: list[StoredBox], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_back(*boxes)


@given(st.data())
def test_boxes_are_accepted_exactly_if_they_have_each_element_once(data: st.DataObject) -> None:
    """Cut at any places, perhaps with one box moved: then some elements may be there twice and others never."""
    shape = tuple(data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    cuts = [sorted({0, size, data.draw(st.integers(0, size)), data.draw(st.integers(0, size))}) for size in shape]
    places = [list(itertools.pairwise(one)) for one in cuts]
    cells = data.draw(st.permutations(list(itertools.product(*places))))
    boxes = [([low for low, _ in bounds], [high - low for low, high in bounds]) for bounds in cells]
    moved, sizes = data.draw(st.sampled_from(boxes))
    if data.draw(st.booleans()):
        moved[:] = [data.draw(st.integers(0, whole - size)) for whole, size in zip(shape, sizes, strict=True)]
    counts = torch.zeros(shape, dtype=torch.int64)
    for offsets, lengths in boxes:
        counts[tuple(slice(first, first + length) for first, length in zip(offsets, lengths, strict=True))] += 1
    stored = [box(0, 1, offsets=tuple(offsets), sizes=tuple(lengths)) for offsets, lengths in boxes]
    if bool((counts == 1).all()):
        assert read_back(*stored, shape=shape).tensors["model.w"].boxes == tuple(stored)
    else:
        with pytest.raises(ValueError, match="each element of it once"):
            read_back(*stored, shape=shape)


@pytest.mark.parametrize("shape", [(2**62, 4), (-8, 4), (1,) * 100])
def test_absurd_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"shape|not a number"):
        read_back(shape=shape)


@pytest.mark.parametrize("data", [b"[]", b"{}", b'{"files": [], "tensors": []}', b"[" * 100_000])
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is not an index"):
        TensorIndex.from_bytes(data, FILES, is_compressed=False)


def test_a_tensor_may_have_as_many_dims_as_torchs() -> None:
    shape = (1,) * 64
    stored = box(0, 1, offsets=(0,) * 64, sizes=shape)
    assert read_back(stored, shape=shape).tensors["model.w"].boxes == (stored,)


def test_a_scalar_has_one_box() -> None:
    stored = box(0, 1, offsets=(), sizes=())
    assert read_back(stored, shape=()).tensors["model.w"].boxes == (stored,)
    with pytest.raises(ValueError, match="each element of it once"):
        read_back(stored, stored, shape=())


def test_item_sizes_are_torchs() -> None:
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    for dtype in dtypes:
        assert item_bytes(str(dtype).removeprefix("torch.")) == dtype.itemsize
    with pytest.raises(ValueError, match="not a dtype"):
        item_bytes("Tensor")


def forge(step: Path, change: Callable[[Any], None]) -> None:
    """Change the index, and let manifest and marker vouch for it."""
    index = json.loads((step / TENSORS).read_bytes())
    change(index)
    (step / TENSORS).write_text(json.dumps(index))
    manifest = json.loads((step / MANIFEST).read_bytes())
    manifest["files"][TENSORS] = record_of((step / TENSORS).read_bytes()).to_json()
    (step / MANIFEST).write_text(json.dumps(manifest))
    (step / MARKER).write_bytes(marker_for((step / MANIFEST).read_bytes()))


def name_private_file(index: Any) -> None:
    index["files"] = ["../../private.txt"]


def name_absurd_shape(index: Any) -> None:
    index["tensors"]["model.w"][1] = [2**50]


@pytest.mark.parametrize("change", [name_private_file, name_absurd_shape])
def test_a_forged_checkpoint_is_neither_whole_nor_loaded_nor_exported(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    (tmp_path / "private.txt").write_text("secret " * 1000)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": {"w": torch.arange(20.0)}})
    forge(tmp_path / "run" / "step-00000001", change)
    verified = CliRunner().invoke(app, ["verify", str(tmp_path / "run")])
    assert verified.exit_code == 1
    assert TENSORS in verified.output
    shown = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert isinstance(shown.exception, CheckpointError)
    assert not (tmp_path / "out").exists()
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(CheckpointError, match=TENSORS):
        manager.load({"model": {"w": torch.zeros(20)}})


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": {"w": torch.arange(20.0)}})
    marker = tmp_path / "step-00000001" / MARKER
    marker.unlink()
    os.mkfifo(marker)
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match="not a regular file"):
        manager.load({"model": {"w": torch.zeros(20)}})
