"""A second home for checkpoints behind the first: any place fsspec reaches, such as s3://bucket/run.

A checkpoint is uploaded after it is published, each rank its own files, the marker last; like on a disk, what has no
marker is not a checkpoint. Its files are those of the directory, so each can be copied back by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torsh_distributed.checkpoint.files.checkpoint_directory import step_called
from torsh_distributed.checkpoint.files.manifest import MANIFEST, MARKER, Manifest
from torsh_distributed.circuit_breaker import CircuitBreaker
from torsh_distributed.errors import CheckpointError, IoError
from torsh_distributed.plan.sections.recovery import RetryConfig
from torsh_distributed.retry import retry
from torsh_distributed.unreadable_data import unreadable_as

R = TypeVar("R")

_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that another attempt does not help."""
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci"})
"""Have no directories: to make one could make a bucket, out of a name that was mistyped."""
PATIENT = RetryConfig(max_retries=6, initial_delay_s=0.25, max_delay_s=30.0, total_timeout_s=3600.0)
"""Waits 16 s in all; the deadline leaves room for attempts that take long themselves."""


class RemoteMirror:
    """Checkpoints under a URL. Transfers that fail are tried again as `policy` says, with growing delays.

    After many failures none is tried for a while, so a service that is down does not cost a timeout for every file.
    """

    def __init__(self, url: str, policy: RetryConfig = PATIENT) -> None:
        # Here, not above: torch brings it along, but few jobs use it.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # has no types

        self.url = url
        self._policy = policy
        self._breaker = CircuitBreaker(url, policy)
        self._losses: dict[int, float | None] = {}
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint.remote = {url} cannot be used: {error}",
                hint="install the package that fsspec names for it, such as s3fs",
            ) from error
        self._root = str(root).rstrip("/")
        names = self._files.protocol
        self._is_flat = not _OBJECT_STORES.isdisjoint([names] if isinstance(names, str) else names)

    def steps(self) -> list[int]:
        """Complete steps, newest first."""
        names = self._tried("list", self._names)
        steps = [step for step in map(step_called, names) if step is not None]
        return sorted((step for step in steps if self._tried("list", partial(self._has_marker, step))), reverse=True)

    def losses(self) -> dict[int, float | None]:
        """The loss of every complete step, newest first."""
        steps = self.steps()
        for step in steps:
            if step not in self._losses:
                with unreadable_as(CheckpointError, f"the manifest of step {step} in {self.url} is damaged"):
                    self._losses[step] = Manifest.from_bytes(self.read(step, MANIFEST)).metadata.loss
        return {step: self._losses[step] for step in steps}

    def begin(self, step: int) -> None:
        """Before any rank uploads files of a step: one that is there already stops being a checkpoint."""
        self._losses.pop(step, None)
        marker = f"{self._place(step)}/{MARKER}"
        if self._tried("look for", partial(self._has_marker, step)):
            self._tried("remove", lambda: self._files.rm_file(marker))

    def upload(self, directory: Path, names: Iterable[str]) -> None:
        """Upload files of a checkpoint; each is complete there, or absent, or not as long as it should be."""
        target = f"{self._root}/{directory.name}"
        if not self._is_flat:
            self._tried("write to", lambda: self._files.makedirs(target, exist_ok=True))
        for name in names:
            self._tried(f"upload {name} to", partial(self._put, directory / name, f"{target}/{name}"))

    def finish(self, directory: Path, others: Iterable[str]) -> None:
        """Upload the rest once every rank has uploaded its own, the marker last."""
        self.upload(directory, [*others, MANIFEST])
        self.upload(directory, [MARKER])

    def remove(self, step: int) -> None:
        """Remove a step, its marker first."""
        self.begin(step)
        self._tried("remove", lambda: self._files.rm(self._place(step), recursive=True))

    def read(self, step: int, name: str) -> bytes:
        """The contents of a small file."""
        found: bytes = self._tried(f"read {name} from", lambda: self._files.cat_file(f"{self._place(step)}/{name}"))
        return found

    def fetch(self, step: int, name: str, into: Path) -> None:
        """Download a file to a path; what it holds is checked by whoever has the manifest."""
        self._tried(f"fetch {name} from", lambda: self._files.get_file(f"{self._place(step)}/{name}", str(into)))

    def _place(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _names(self) -> list[str]:
        self._files.invalidate_cache()  # other processes write there too
        if not self._files.exists(self._root):
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in self._files.ls(self._root, detail=False)]

    def _has_marker(self, step: int) -> bool:
        return bool(self._files.exists(f"{self._place(step)}/{MARKER}"))

    def _put(self, source: Path, target: str) -> None:
        self._files.put_file(str(source), target)
        self._files.invalidate_cache()
        expected, found = source.stat().st_size, int(self._files.info(target)["size"])
        if found != expected:
            raise OSError(f"{target} has {found} of {expected} bytes after the upload")

    def _tried(self, what: str, call: Callable[[], R]) -> R:
        """Call it, again if it fails: storage behind a network does, now and then."""

        # Asked once: a call that is being repeated is not given up for the failures it adds itself.
        self._breaker.require_closed()

        @retry(self._policy)
        def attempt() -> Any:
            try:
                found = call()
            except _FOR_GOOD:
                self._breaker.succeeded()  # the service answers
                raise  # not one of our errors, so not tried again
            except Exception as error:  # each of fsspec's packages raises the errors of its own library
                self._breaker.failed(error)
                text = f"cannot {what} {self.url}: {str(error) or type(error).__name__}"
                raise IoError(text, errno=error.errno if isinstance(error, OSError) else None) from error
            self._breaker.succeeded()
            return found

        try:
            result: R = attempt()
        except _FOR_GOOD as error:
            raise CheckpointError(
                f"cannot {what} {self.url}: {str(error) or type(error).__name__}",
                hint="check checkpoint.remote, and whether this user may read and write there",
            ) from error
        return result
