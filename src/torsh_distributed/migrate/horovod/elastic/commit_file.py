"""The last commit in a file of the job, for an attempt that follows after all workers were started again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from torsh_distributed import known_variables
from torsh_distributed.migrate.horovod.collectives.object_encoding import decode_object, encode_object

_NAME = "horovod-commit.pt"


class CommitFile:
    """A file in the job's directory, which only this user can open and which the launcher removes with the job."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt

    @classmethod
    def of_job(cls) -> Self | None:
        """The file of the job that this process belongs to; None if its workers are never started again."""
        progress = os.environ.get("TORSH_PROGRESS_FILE")
        if not progress or known_variables.whole_number("TORCHELASTIC_MAX_RESTARTS") == 0:
            return None
        attempt = known_variables.whole_number("TORCHELASTIC_RESTART_COUNT")
        return cls(Path(progress).parent / _NAME, attempt)

    def write(self, commit: dict[str, Any]) -> None:
        """Replace the commit; a crash meanwhile leaves the one before."""
        draft = self._path.with_suffix(".draft")
        tensors: list[Tensor] = []
        structure = torch.frombuffer(bytearray(encode_object(commit, tensors)), dtype=torch.uint8)
        torch.save({"structure": structure, "tensors": tensors}, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(self._path)

    def read(self) -> dict[str, Any] | None:
        """The commit of an earlier attempt; None in the first."""
        if self._attempt == 0 or not self._path.exists():
            return None
        held = torch.load(self._path, map_location="cpu", weights_only=True)
        commit: dict[str, Any] = decode_object(held["structure"].numpy().tobytes(), held["tensors"])
        return commit
