"""A manifest is read back as written, or refused: what is wrong with it, and in which file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.checkpoint.files.block_hashes import BLOCK_BYTES, FileRecord, record_of
from torsh_distributed.checkpoint.files.manifest import (
    FORMAT,
    MANIFEST,
    MARKER,
    CheckpointMetadata,
    Manifest,
    is_checkpoint,
    is_count,
    marker_for,
    read_manifest,
)
from torsh_distributed.errors import CheckpointError

WRITTEN = Manifest(
    metadata=CheckpointMetadata(
        step=7,
        epoch=2,
        loss=0.5,
        learning_rate=1e-3,
        time=1.7e9,
        world_size=4,
        mesh={"dp": 2, "shard": 2},
        plan={"mesh": {"dp": 2}},
        plan_hash="ab",
        git_commit="cd",
        versions={"torch": "2.13"},
        reason="best",
    ),
    files={"__0_0.distcp": record_of(b"some tensors"), "rank-0.state": FileRecord(0, ())},
    compression="zstd",
)


def save(folder: Path, text: bytes, marker: bytes | None = None) -> Path:
    (folder / MANIFEST).write_bytes(text)
    (folder / MARKER).write_bytes(marker_for(text) if marker is None else marker)
    return folder


def changed(path: str, value: object) -> bytes:
    """The manifest with another value at a dotted place."""
    whole = json.loads(WRITTEN.to_bytes())
    *owners, last = path.split("/")
    inner: Any = whole
    for owner in owners:
        inner = inner[owner]
    inner[last] = value
    return json.dumps(whole).encode()


def test_a_manifest_is_read_back_as_written(tmp_path: Path) -> None:
    assert read_manifest(save(tmp_path, WRITTEN.to_bytes())) == WRITTEN
    assert WRITTEN.num_bytes == len(b"some tensors")
    plain = replace(WRITTEN, compression=None, metadata=CheckpointMetadata(step=0))
    assert Manifest.from_bytes(plain.to_bytes()) == plain
    newer_fields = changed("metadata/mood", "good")
    assert Manifest.from_bytes(newer_fields) == WRITTEN


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("compression", "gzip"),
        ("metadata/step", -1),
        ("metadata/step", 2**63),
        ("metadata/step", 1.0),
        ("metadata/step", True),
        ("metadata/epoch", None),
        ("metadata/loss", "0.5"),
        ("metadata/loss", 2**63),
        ("metadata/learning_rate", [1]),
        ("metadata/time", -0.5),
        ("metadata/time", 253_402_300_800.0),
        ("metadata/time", "now"),
        ("metadata/world_size", 0),
        ("metadata/world_size", 1.5),
        ("metadata/mesh", [1]),
        ("metadata/mesh/dp", -2),
        ("metadata/plan", "dp"),
        ("metadata/plan_hash", 3),
        ("metadata/git_commit", 3),
        ("metadata/versions", "2.13"),
        ("metadata/versions/torch", 2.13),
        ("metadata/reason", None),
        ("files/__0_0.distcp/bytes", -1),
        ("files/__0_0.distcp/bytes", 2**63),
        ("files/__0_0.distcp/bytes", 12.0),
        ("files/__0_0.distcp/bytes", BLOCK_BYTES + 1),
        ("files/__0_0.distcp/hashes", "ab"),
        ("files/__0_0.distcp/hashes", []),
        ("files/__0_0.distcp/hashes", [3]),
        ("files/../../etc", {"bytes": 0, "hashes": []}),
        ("files/.", {"bytes": 0, "hashes": []}),
        (f"files/{'a' * 201}", {"bytes": 0, "hashes": []}),
        (f"files/{MARKER}", {"bytes": 0, "hashes": []}),
        (f"files/{MANIFEST}", {"bytes": 0, "hashes": []}),
    ],
)
def test_a_value_that_nobody_writes_is_damage_of_the_manifest(tmp_path: Path, path: str, value: object) -> None:
    is_outside = path == "files/../../etc"  # a name with slashes, not a place
    text = changed("files", {"../../etc": value}) if is_outside else changed(path, value)
    with pytest.raises(CheckpointError, match=r"manifest\.json: it is not a manifest"):
        read_manifest(save(tmp_path, text))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata/loss", None),
        ("metadata/loss", -3),
        ("metadata/loss", 2**63 - 1),
        ("metadata/time", 0),
        ("metadata/time", 253_402_300_799.0),
        ("metadata/step", 2**63 - 1),
        ("metadata/world_size", 1),
        ("metadata/plan", None),
        ("files/__0_0.distcp", {"bytes": BLOCK_BYTES + 1, "hashes": ["a", "b"]}),
        ("files/__0_0.distcp", {"bytes": BLOCK_BYTES, "hashes": ["a"]}),
        (f"files/{'a' * 200}", {"bytes": 0, "hashes": []}),
    ],
)
def test_values_at_the_edge_are_read(path: str, value: object) -> None:
    Manifest.from_bytes(changed(path, value))


def test_a_marker_and_a_manifest_belong_together(tmp_path: Path) -> None:
    text = WRITTEN.to_bytes()
    other = changed("metadata/step", 8)
    with pytest.raises(CheckpointError, match=r"manifest\.json, bytes 0 to .*do not belong together"):
        read_manifest(save(tmp_path, text, marker_for(other)))
    with pytest.raises(CheckpointError, match=r"COMMITTED, bytes 0 to .*do not belong together"):
        read_manifest(save(tmp_path, text, marker_for(text) + b" "))
    with pytest.raises(CheckpointError, match=r"COMMITTED, bytes 0 to .*do not belong together"):
        read_manifest(save(tmp_path, text, json.dumps({"format": FORMAT}).encode()))
    with pytest.raises(CheckpointError, match=r"COMMITTED.*it is not a marker"):
        read_manifest(save(tmp_path, text, b"{"))


def test_a_newer_format_is_told_from_damage(tmp_path: Path) -> None:
    newer = json.dumps({"format": FORMAT + 1, "manifest": {}}).encode()
    with pytest.raises(CheckpointError, match=f"is of format {FORMAT + 1}") as caught:
        read_manifest(save(tmp_path, b"anything", newer))
    assert caught.value.context["newer_format"] == FORMAT + 1
    for marker in (newer.replace(b": ", b":"), json.dumps({"format": str(FORMAT + 1)}).encode()):
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(save(tmp_path, WRITTEN.to_bytes(), marker))


def test_what_is_missing_or_a_link_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="COMMITTED: cannot be read: no such file"):
        read_manifest(tmp_path)
    save(tmp_path, WRITTEN.to_bytes())
    assert is_checkpoint(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    assert not is_checkpoint(tmp_path / "link")
    (tmp_path / MANIFEST).rename(tmp_path / "elsewhere")
    (tmp_path / MANIFEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read: it is a symbolic link"):
        read_manifest(tmp_path)
    (tmp_path / MARKER).unlink()
    assert not is_checkpoint(tmp_path)


def test_counts_are_whole_numbers_that_fit_in_63_bits() -> None:
    assert [is_count(one) for one in (0, 2**63 - 1, 2**63, -1, 1.0, True, "1", None)] == [True, True, *[False] * 6]
