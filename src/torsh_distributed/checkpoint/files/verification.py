"""Whether the files of a checkpoint are those that were written."""

from __future__ import annotations

from pathlib import Path

from torsh_distributed.checkpoint.files.block_hashes import FileDamage, Progress, check_file, damaged
from torsh_distributed.checkpoint.files.manifest import MANIFEST, MARKER, TENSORS, Manifest, read_plain
from torsh_distributed.checkpoint.files.mapped_file import MappedFile
from torsh_distributed.checkpoint.files.tensor_index import TensorIndex


def find_damage(
    directory: Path,
    manifest: Manifest,
    *,
    part: int = 0,
    num_parts: int = 1,
    progress: Progress | None = None,
    opened: dict[str, MappedFile] | None = None,
) -> list[FileDamage]:
    """Read every file, or one of `num_parts` equal shares of all blocks, and compare it with the manifest.

    A rank's share is about the file that it wrote, which it is likely to load next; `opened` gets the files.
    """
    names = sorted(manifest.files, key=lambda name: (len(name), name))
    blocks = [(name, number) for name in names for number in _blocks(manifest, name)]
    first, last = part * len(blocks) // num_parts, (part + 1) * len(blocks) // num_parts
    mine: dict[str, list[int]] = {}
    for name, number in blocks[first:last]:
        mine.setdefault(name, []).append(number)
    return [
        damage
        for name, numbers in mine.items()
        for damage in check_file(
            directory, name, manifest.files[name], [one for one in numbers if one >= 0], progress, opened
        )
    ]


def read_index(directory: Path, manifest: Manifest) -> TensorIndex:
    """Where the tensors are, checked against the checkpoint's own files; CheckpointError names what does not fit."""
    sizes = {name: record.num_bytes for name, record in manifest.files.items()}
    try:
        return TensorIndex.from_bytes(
            read_plain(directory, TENSORS), sizes, is_compressed=manifest.compression is not None
        )
    except ValueError as error:
        raise damaged(directory, [FileDamage(TENSORS, f"cannot be understood: {error}")]) from error


def foreign_files(directory: Path, manifest: Manifest) -> list[str]:
    """Files in the directory that are not the checkpoint's; they do no harm."""
    known = {*manifest.files, MANIFEST, MARKER}
    return sorted(path.name for path in directory.iterdir() if path.name not in known)


def _blocks(manifest: Manifest, name: str) -> range:
    """Numbers of a file's blocks; -1 stands for an empty file, whose size is checked."""
    count = len(manifest.files[name].hashes)
    return range(count) if count else range(-1, 0)
