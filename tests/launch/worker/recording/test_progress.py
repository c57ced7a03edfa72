from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import IoError
from torsh_distributed.events import CheckpointEvent, StepEvent, emit
from torsh_distributed.launch.worker.recording.progress import Progress, ProgressWriter, read_progress

STEPS = st.none() | st.integers(0, 2**62)


def test_the_last_step_and_the_last_saved_step_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    with ProgressWriter(path):
        assert read_progress(path) == Progress()
        emit(StepEvent(step=7, duration_s=0.1))
        assert read_progress(path) == Progress(step=7)
        emit(CheckpointEvent(action="saved", path="c", step=5))
        emit(CheckpointEvent(action="loaded", path="c", step=99))
        emit(CheckpointEvent(action="saved", path="c", step=6, error="disk full"))
        emit(StepEvent(step=8, duration_s=0.1))
    emit(StepEvent(step=9, duration_s=0.1))
    assert read_progress(path) == Progress(step=8, checkpoint_step=5)


def test_what_training_goes_on_from_is_the_last_checkpoint_until_one_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    with ProgressWriter(path):
        emit(CheckpointEvent(action="model loaded", path="pretrained", step=5000))
        emit(CheckpointEvent(action="replica loaded", path="memory of the ranks at step 104", step=104))
        assert read_progress(path) == Progress()
        emit(CheckpointEvent(action="loaded", path="c", step=100))
        emit(StepEvent(step=101, duration_s=0.1))
        assert read_progress(path) == Progress(step=101, checkpoint_step=100)
        emit(CheckpointEvent(action="saved", path="c", step=110))
    assert read_progress(path) == Progress(step=101, checkpoint_step=110)


def test_progress_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    pid = os.fork()
    if pid == 0:
        ProgressWriter(path).record(step=41, checkpoint_step=40)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert read_progress(path) == Progress(step=41, checkpoint_step=40)


@given(step=STEPS, checkpoint_step=STEPS)
def test_every_number_is_read_back(tmp_path_factory: pytest.TempPathFactory, step: int, checkpoint_step: int) -> None:
    path = tmp_path_factory.mktemp("progress") / "file"
    with ProgressWriter(path) as writer:
        writer.record(step=step, checkpoint_step=checkpoint_step)
    assert read_progress(path) == Progress(step=step, checkpoint_step=checkpoint_step)


@given(position=st.integers(0, 27), flip=st.integers(1, 255))
def test_a_damaged_record_is_unknown_rather_than_wrong(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("progress") / "file"
    with ProgressWriter(path) as writer:
        writer.record(step=1000, checkpoint_step=900)
    data = bytearray(path.read_bytes())
    data[position] ^= flip
    path.write_bytes(data)
    assert read_progress(path) == Progress()


def test_what_is_no_progress_file_is_unknown(tmp_path: Path) -> None:
    assert read_progress(tmp_path / "absent") == Progress()
    (tmp_path / "short").write_bytes(b"TORSH")
    assert read_progress(tmp_path / "short") == Progress()


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(IoError, match=r"nowhere/progress"):
        ProgressWriter(tmp_path / "nowhere" / "progress")
