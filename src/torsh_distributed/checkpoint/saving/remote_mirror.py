"""A second home for checkpoints behind the first: any place fsspec reaches, such as s3://bucket/run.

A checkpoint is uploaded after it is published, each rank its own files, the marker last; like on a disk, what has no
marker is not a checkpoint. A load fetches what the directory lacks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory, sync_directory
from torsh_distributed.checkpoint.files.manifest import MANIFEST, MARKER, read_manifest
from torsh_distributed.circuit_breaker import CircuitBreaker
from torsh_distributed.errors import CheckpointError, IoError
from torsh_distributed.plan import RetryConfig
from torsh_distributed.retry import retry

R = TypeVar("R")


class RemoteMirror:
    """Checkpoints under a URL. Transfers that fail are tried again; after many, none is for a while: see [retry]."""

    def __init__(self, url: str, policy: RetryConfig | None = None) -> None:
        # Here, not above: torch brings it along, but few jobs use it.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # has no types

        self.url = url
        self._policy = policy
        self._breaker = CircuitBreaker(url, policy)
        try:
            self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint.remote = {url} cannot be used: {error}",
                hint="install the package that fsspec names for it, such as s3fs",
            ) from error

    def steps(self) -> list[int]:
        """Complete steps, newest first."""
        files = self._files
        names = self._tried(lambda: files.ls(self._root, detail=False) if files.exists(self._root) else [])
        found = [str(name).rstrip("/").rpartition("/")[2] for name in names]
        steps = [int(name.removeprefix("step-")) for name in found if name.startswith("step-")]
        return sorted((step for step in steps if self._tried(partial(self._has_marker, step))), reverse=True)

    def upload(self, directory: Path, names: Iterable[str]) -> None:
        """Upload files of a checkpoint."""
        target = f"{self._root}/{directory.name}"
        self._tried(lambda: self._files.makedirs(target, exist_ok=True))
        for name in names:
            self._tried(partial(self._files.put_file, str(directory / name), f"{target}/{name}"))

    def finish(self, directory: Path, others: Iterable[str]) -> None:
        """Upload the rest once every rank has uploaded its own, the marker last."""
        self.upload(directory, [*others, MANIFEST])
        self.upload(directory, [MARKER])

    def remove(self, step: int) -> None:
        """Remove a step, its marker first."""
        place = f"{self._root}/step-{step:08d}"
        self._tried(lambda: self._files.rm_file(f"{place}/{MARKER}"))
        self._tried(lambda: self._files.rm(place, recursive=True))

    def fetch(self, step: int, directory: CheckpointDirectory) -> Path:
        """Download a step into the directory; it appears there complete or not at all."""
        target = directory.step_path(step)
        place = f"{self._root}/{target.name}"
        directory.path.mkdir(parents=True, exist_ok=True)
        written = directory.begin(step, "fetched")
        try:
            for name in (MARKER, MANIFEST):
                self._tried(partial(self._files.get_file, f"{place}/{name}", str(written / name)))
            for name in read_manifest(written).files:
                self._tried(partial(self._files.get_file, f"{place}/{name}", str(written / name)))
            sync_directory(written)
            return directory.publish(written, step)
        except BaseException:
            shutil.rmtree(written, ignore_errors=True)
            raise

    def _has_marker(self, step: int) -> bool:
        return bool(self._files.exists(f"{self._root}/step-{step:08d}/{MARKER}"))

    def _tried(self, call: Callable[[], R]) -> R:
        """Call it, again if it fails: storage behind a network does, now and then."""

        @retry(self._policy)
        def attempt() -> Any:
            try:
                return self._breaker.call(call)
            except IoError:  # not tried, because of many failures before
                raise
            except OSError as error:
                raise IoError(f"remote storage: {error}", errno=error.errno) from error

        result: R = attempt()
        return result
