"""The watch behind the file store's waits: events, not the passing of time, end a wait."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torsh_distributed.comm.store.file_watch import FileWatch

LONG_S = 30.0


def close_after_writing(path: Path) -> None:
    path.open("r+b").close()


def timed_wait(watch: FileWatch, timeout_s: float) -> float:
    began = time.monotonic()
    watch.wait(timeout_s)
    return time.monotonic() - began


def test_a_close_by_a_writer_ends_the_wait(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with FileWatch(path) as watch, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(timed_wait, watch, LONG_S)
        close_after_writing(path)
        assert waiting.result() < LONG_S


def test_a_close_before_the_wait_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with FileWatch(path) as watch:
        for _ in range(200):
            close_after_writing(path)
        assert timed_wait(watch, LONG_S) < LONG_S


def test_readers_wake_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with FileWatch(path) as watch:
        path.read_bytes()
        assert timed_wait(watch, 0.05) >= 0.04


def test_without_a_file_to_watch_a_wait_lasts_its_time(tmp_path: Path) -> None:
    with FileWatch(tmp_path / "absent") as watch:
        assert timed_wait(watch, 0.05) >= 0.04
