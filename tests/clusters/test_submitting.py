"""Handing a job over: it is submitted and remembered, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from torsh_distributed.clusters import registry, submit
from torsh_distributed.clusters.registry import EngineEntry
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import CommunicationError, InvalidArgument


class NotingEngine:
    """Takes jobs, and notes what becomes of them."""

    noted: list[str]

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def submit(self, submission: Submission) -> str:
        """Refuse it if the options say so."""
        if "refuse" in self._options:
            raise CommunicationError("no room")
        self.noted.append("submitted")
        return "4711"

    def found_at(self) -> dict[str, str]:
        """Where it was found."""
        return {"address": "there"}

    def cancel(self, job_id: str) -> None:
        """Note it."""
        self.noted.append(f"cancelled {job_id}")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine named `noting` was asked to do."""
    entry = EngineEntry(home=f"{__name__}:NotingEngine", summary="for a test")
    monkeypatch.setitem(registry.ENGINES, "noting", entry)
    NotingEngine.noted = []
    return NotingEngine.noted


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_a_job_is_remembered_under_a_name_that_no_other_has(noted: list[str], script: Path, state_dir: Path) -> None:
    first = submit(script, to="noting", name="first", options={"refuse_later": "no"}).record
    assert first.job_id == "4711"
    assert first.options == {"refuse_later": "no", "address": "there"}, "so that the same cluster is asked later"
    with pytest.raises(InvalidArgument, match="a job named 'first' was submitted before"):
        submit(script, to="noting", name="first")
    assert noted == ["submitted"]
    assert [path.name for path in (state_dir / "jobs").iterdir()] == ["first"]


def test_a_job_that_is_refused_leaves_nothing(noted: list[str], script: Path, state_dir: Path) -> None:
    with pytest.raises(CommunicationError, match="no room"):
        submit(script, to="noting", options={"refuse": "1"})
    assert list((state_dir / "jobs").iterdir()) == []


def test_a_job_that_cannot_be_remembered_is_ended(
    noted: list[str], script: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("torsh_distributed.clusters.job_records.write_private", fail)
    with pytest.raises(OSError, match="no space"):
        submit(script, to="noting")
    assert noted == ["submitted", "cancelled 4711"]
    assert list((state_dir / "jobs").iterdir()) == []
