"""Headers are read as the format says, and damaged files are named."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.weights.checkpoints import write_file
from torsh_distributed.errors import CheckpointError, FeatureNotAvailable
from torsh_distributed.parallel.weights.reading import whole_tensor
from torsh_distributed.parallel.weights.safetensors_format import header_bytes, read_header, room_for
from torsh_distributed.parallel.weights.tensor_files import stored_tensors


def test_a_header_says_where_the_bytes_are(tmp_path: Path) -> None:
    file = tmp_path / "one.safetensors"
    tensors = {"a": torch.arange(6).view(2, 3), "b": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
    write_file(file, tensors)
    found = read_header(file)
    assert {name: one.shape for name, one in found.items()} == {"a": (2, 3), "b": (), "empty": (0, 3)}
    data = file.read_bytes()
    one = found["a"]
    assert data[one.start : one.start + one.num_bytes] == bytes(tensors["a"].view(torch.uint8).numpy())
    assert one.row_bytes == 3 * 8
    assert found["b"].num_bytes == 4


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-4], "the bytes of b are not all there"),
        (lambda data: data[:5], "does not begin with a header"),
        (lambda data: b"PK" + data[2:], "does not begin with a header"),
        (lambda data: data[:8] + b"?" + data[9:], "not JSON"),
        (lambda data: data.replace(b'"F32"', b'"F31"'), "unknown dtype F31"),
        (lambda data: data.replace(b"[4]", b"-4 "), "not one of tensors"),
        (lambda data: data.replace(b"[4]", b'"x"'), "cannot have the shape"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage, said: str) -> None:
    file = tmp_path / "one.safetensors"
    write_file(file, {"a": torch.arange(6), "b": torch.ones(4)})
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("num_spaces", range(4))
def test_a_whole_tensor_is_read_at_any_offset(tmp_path: Path, num_spaces: int) -> None:
    file = tmp_path / "one.safetensors"
    values = torch.arange(12.0).view(3, 4)
    entries = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "values": {"dtype": "F32", "shape": [3, 4], "data_offsets": [3, 51]},
    }
    header = json.dumps(entries).encode() + b" " * num_spaces
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"odd" + values.numpy().tobytes())
    torch.testing.assert_close(whole_tensor(read_header(file)["values"])[:, 1:3], values[:, 1:3], rtol=0, atol=0)


def test_a_whole_tensor_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "one.safetensors"
    write_file(file, {"a": torch.ones(4)})
    stored = read_header(file)["a"]
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"a of .*one.safetensors cannot be read"):
        whole_tensor(stored)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(FeatureNotAvailable, match=r"torsh-distributed\[hf\]"):
        whole_tensor(stored)


def test_the_room_for_a_header_is_enough_and_aligned() -> None:
    names = [f"layers.{number}.é" for number in range(50)]
    room = room_for(names)
    longest = {"dtype": "F8_E4M3", "shape": [10**11] * 8, "data_offsets": [10**18, 10**18 + 1]}
    assert len(header_bytes(dict.fromkeys(names, longest), length=room)) == room + 8
    assert (room + 8) % 64 == 0


@pytest.mark.parametrize("name", ["../private.safetensors", "/private.safetensors", "..", "notes.txt", 7])
def test_an_index_that_names_other_files_is_refused(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_file(tmp_path / "private.safetensors", {"a": torch.ones(4)})
    (folder / "notes.txt").write_text("mine")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"beside it|not an index"):
        stored_tensors(folder)
