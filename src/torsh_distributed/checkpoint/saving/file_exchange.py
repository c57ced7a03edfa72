"""Makes a checkpoint whole on every node: from the other nodes, which each have a part of it, or from the remote place.

A disk of one node holds the files of its own ranks. To load, a node needs them all, because another plan, or a replica,
reads what other ranks wrote. What a node has and is damaged is replaced the same way.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torsh_distributed.checkpoint.files.block_hashes import (
    BLOCK_BYTES,
    FileRecord,
    HashedFile,
    check_file,
    write_file,
)
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, cannot_write
from torsh_distributed.checkpoint.files.manifest import (
    MANIFEST,
    MARKER,
    Manifest,
    marker_for,
    read_manifest,
    read_plain,
)
from torsh_distributed.checkpoint.files.mapped_file import read_exactly
from torsh_distributed.checkpoint.saving.node_ranks import NodeRanks, first_ranks, gathered
from torsh_distributed.checkpoint.saving.remote_mirror import RemoteMirror
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.errors import CheckpointError, TorshError
from torsh_distributed.unreadable_data import unreadable_as

_JOB = "fetched"


@dataclass(frozen=True)
class FileExchange:
    """Brings files of a step to the nodes that lack them; every rank makes one and makes the same calls."""

    directory: CheckpointDirectory
    nodes: NodeRanks
    group: dist.ProcessGroup | None
    mirror: RemoteMirror | None

    def complete(self, step: int, *, is_remote: bool) -> str | None:
        """Make a step whole on every node, with the lock of the directory held; returns what is missing, if anything.

        A node's directory changes at once, and only to what the manifest says. `is_remote`: the mirror has the step.
        """
        path = self.directory.step_path(step)
        text = self._manifest(step, is_remote=is_remote)
        if text is None:
            return f"{path.name} has a manifest neither on a node nor in the remote place"
        with unreadable_as(CheckpointError, f"{path.name} has a manifest that cannot be understood"):
            manifest = Manifest.from_bytes(text)
        whole = self._whole_files(path, manifest)
        if all(names == set(manifest.files) for names in whole.values()) and self._all_have(path, text):
            return None
        absent = [name for name in manifest.files if not any(name in names for names in whole.values())]
        if absent and not is_remote:
            return f"{path.name}: {', '.join(sorted(absent)[:3])} is whole on no node, and not in the remote place"
        with fail_together("fetch a checkpoint", self.group), _explained(path):
            if self.nodes.is_keeper:
                shutil.rmtree(self.directory.path / f".{path.name}.{_JOB}", ignore_errors=True)
                self.directory.begin(step, _JOB)
        written = self.directory.path / f".{path.name}.{_JOB}"
        try:
            self._bring(step, path, written, manifest, whole)
            with fail_together("fetch a checkpoint", self.group), _explained(path):
                if self.nodes.is_keeper:
                    write_file(written / MANIFEST, text)
                    write_file(written / MARKER, marker_for(text))
                    self.directory.publish(written, step)
        except BaseException:
            if self.nodes.is_keeper:
                shutil.rmtree(written, ignore_errors=True)
            raise
        return None

    def _bring(self, step: int, path: Path, written: Path, manifest: Manifest, whole: Mapping[int, set[str]]) -> None:
        """Fill the new directory of every node: links to what it has, copies of what it lacks; verified."""
        mine = whole[self.nodes.members[0]]
        with fail_together("fetch a checkpoint", self.group), _explained(path):
            for name in mine if self.nodes.is_keeper else ():
                os.link(path / name, written / name)
        for name in sorted(manifest.files):
            holders = [keeper for keeper, names in whole.items() if name in names]
            if holders and len(holders) < len(whole):
                self._spread(path / name, written / name, manifest.files[name], holders[0], is_needed=name not in mine)
        from_remote = [name for name in sorted(manifest.files) if not any(name in names for names in whole.values())]
        with fail_together("fetch a checkpoint", self.group), _explained(path):
            for name in self._share(from_remote):
                assert self.mirror is not None, "asked above"
                self.mirror.fetch(step, name, written / name)
            damage = [
                one
                for name in self._share(name for name in sorted(manifest.files) if name not in mine)
                for one in check_file(written, name, manifest.files[name])
            ]
            if damage:
                raise CheckpointError(f"{path.name} was fetched, but {damage[0]}", path=str(path))

    def _spread(self, source: Path, target: Path, record: FileRecord, holder: int, *, is_needed: bool) -> None:
        """Send a file block by block from one keeper to the nodes that lack it; every rank calls this."""
        is_sender = self.nodes.rank == holder
        failure: OSError | None = None
        file = None
        try:
            file = HashedFile(target) if is_needed and self.nodes.is_keeper else None
        except OSError as error:
            failure = error
        with (source if is_sender else Path(os.devnull)).open("rb") as stream:
            for start in range(0, record.num_bytes, BLOCK_BYTES):
                block = bytearray(min(BLOCK_BYTES, record.num_bytes - start) if is_sender else 0)
                if is_sender:
                    read_exactly(stream.fileno(), memoryview(block), start)
                data = broadcast_object(bytes(block), holder, group=self.group)
                try:
                    if file is not None and failure is None:
                        file.write(data)
                except OSError as error:
                    failure = error  # but the others go on sending
        with fail_together("fetch a checkpoint", self.group), _explained(target):
            if failure is not None:
                if file is not None:
                    file.abandon()
                raise failure
            if file is not None:
                file.close()

    def _manifest(self, step: int, *, is_remote: bool) -> bytes | None:
        """The manifest that most nodes have for a step, else the remote one; None if there is none."""
        path = self.directory.step_path(step)
        with fail_together("read the manifest", self.group):
            mine = _manifest_text(path) if self.nodes.is_keeper else None
        found = [one for one in gathered(mine, self.group) if one is not None]
        if found:
            return bytes(Counter(found).most_common(1)[0][0])
        text: bytes | None = None
        with fail_together("read the remote manifest", self.group):
            if is_remote and self.nodes.rank == 0:
                assert self.mirror is not None, "it has the step"
                text, marker = self.mirror.read(step, MANIFEST), self.mirror.read(step, MARKER)
                text = text if marker == marker_for(text) else None
        shared: bytes | None = first_ranks(text, self.group)
        return shared

    def _whole_files(self, path: Path, manifest: Manifest) -> dict[int, set[str]]:
        """By keeper: the files that its directory has as the manifest says; its ranks read a share each."""
        is_readable = path.is_dir() and not path.is_symlink()
        names = self._share(sorted(manifest.files)) if is_readable else []
        good = [name for name in names if not check_file(path, name, manifest.files[name])]
        everyone = gathered([self.nodes.members[0], good], self.group)
        return {
            keeper: {name for owner, found in everyone if owner == keeper for name in found}
            for keeper in self.nodes.keepers
        }

    def _all_have(self, path: Path, text: bytes) -> bool:
        """Whether every node has the manifest and its marker."""
        try:
            mine = not self.nodes.is_keeper or (
                (path / MANIFEST).read_bytes() == text and (path / MARKER).read_bytes() == marker_for(text)
            )
        except OSError:
            mine = False
        return all(gathered(mine, self.group))

    def _share(self, names: Iterable[str]) -> list[str]:
        """This rank's share of work that the ranks of a node divide."""
        return list(names)[self.nodes.position :: len(self.nodes.members)]


def _manifest_text(path: Path) -> bytes | None:
    """A directory's manifest if it fits its marker; None if it is damaged or absent. A newer format raises."""
    try:
        read_manifest(path)
        return read_plain(path, MANIFEST)
    except OSError:
        return None
    except CheckpointError as error:
        if "newer_format" in error.context:
            raise
        return None  # others may have it


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError of the system into the error that says what to do about it."""
    try:
        yield
    except TorshError:
        raise
    except OSError as error:
        raise cannot_write(Path(error.filename or path), error) from error
