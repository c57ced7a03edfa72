"""Tensors that change together or not at all, also when the process that changes them is killed."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
import torch
from torch import Tensor

from torsh_distributed.errors import CheckpointError
from torsh_distributed.rpc.parameters.kept_tensors import KeptTensors


def begun(path: Path) -> KeptTensors:
    kept = KeptTensors(path)
    kept.add("whole", (3,), torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    kept.add("table", (4, 2), torch.float64).copy_(torch.arange(8).view(4, 2))
    kept.commit(version=1)
    return kept


ROWS = torch.tensor([2, 0])


def change(kept: KeptTensors) -> None:
    kept["whole"].fill_(7)
    kept["table"][ROWS] = -1.0
    kept.add("new", (2,), torch.int32)


def found(kept: KeptTensors) -> tuple[int, list[float], Tensor, bool]:
    return kept.values["version"], kept["whole"].tolist(), kept["table"].clone(), "new" in kept


def test_a_committed_change_is_what_the_next_process_finds(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    with kept.changing([("whole", None), ("table", ROWS)]):
        change(kept)
        kept.commit(version=2)
    version, whole, table, has_new = found(KeptTensors(tmp_path))
    assert (version, whole, has_new) == (2, [7.0] * 3, True)
    assert table[ROWS].eq(-1).all()
    assert table[1].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("num_undone", [1, 2])
def test_a_change_that_did_not_end_is_undone_by_the_next_process(tmp_path: Path, num_undone: int) -> None:
    kept = begun(tmp_path)
    context = kept.changing([("whole", None), ("table", ROWS)])
    context.__enter__()  # what a killed process leaves: nothing after this runs
    change(kept)
    for _ in range(num_undone):
        version, whole, table, has_new = found(KeptTensors(tmp_path))
        assert (version, whole, has_new) == (1, [1.0, 2.0, 3.0], False)
        assert torch.equal(table, torch.arange(8, dtype=torch.float64).view(4, 2))
    assert len(list(tmp_path.glob("tensor-*"))) == 2


def test_a_change_that_raises_is_undone_and_the_one_after_it_can_be_undone_too(tmp_path: Path) -> None:
    kept = begun(tmp_path)
    with pytest.raises(ZeroDivisionError), kept.changing([("whole", None), ("table", ROWS)]):
        change(kept)
        raise ZeroDivisionError
    assert found(kept)[:2] == (1, [1.0, 2.0, 3.0])
    assert "new" not in kept
    # Killed while the old bytes of the next change are written over those of this one.
    kept._undo_memory(1).fill_(0xFF)
    assert found(KeptTensors(tmp_path))[1] == [1.0, 2.0, 3.0]


def test_a_saved_copy_is_a_state_to_begin_with(tmp_path: Path) -> None:
    kept = begun(tmp_path / "live")
    kept.save(tmp_path / "copy")
    kept["whole"].fill_(9)
    assert found(KeptTensors(tmp_path / "copy"))[:2] == (1, [1.0, 2.0, 3.0])


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    begun(tmp_path)
    next(tmp_path.glob("tensor-1")).write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"kept tensor whole.*5 bytes instead of 12"):
        KeptTensors(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"number": 0, "values": {}}),
        msgpack.packb({"number": 0, "values": {}, "tensors": [["p/one", "../private", 0, [4]]]}),
        msgpack.packb({"number": 0, "values": {}, "tensors": [["p/one", "tensor-1/../../private", 0, [4]]]}),
        msgpack.packb({"number": 0, "values": {}, "tensors": [["p/one", "tensor-1", 999, [4]]]}),
        msgpack.packb({"number": 0, "values": {}, "tensors": [["p/one", "tensor-1", 0, [-4]]]}),
        msgpack.packb({"number": 0, "values": {}, "tensors": [["p/one", "tensor-1", "x", None]]}),
    ],
)
def test_a_forged_record_opens_nothing_and_is_named(tmp_path: Path, record: bytes) -> None:
    private = tmp_path / "private"
    private.write_bytes(bytes(16))
    directory = tmp_path / "kept"
    directory.mkdir()
    (directory / "record").write_bytes(record)
    with pytest.raises(CheckpointError, match="not one that a server wrote"):
        KeptTensors(directory)
    assert private.read_bytes() == bytes(16)
