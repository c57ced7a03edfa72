"""What only the file store can get wrong: concurrent writers, writers killed at the worst moment, damage, rewriting."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bed.world import World
from torsh_distributed.comm.store import file_log, open_store
from torsh_distributed.comm.store.file import FileWatch
from torsh_distributed.comm.store.table import StoredValue
from torsh_distributed.errors import InvalidArgument, IoError, OperationTimeout


def die_within_a_write(url: str, num_bytes_written: int) -> None:
    """Write a record of which only the first bytes reach the file before SIGKILL."""
    with open_store(url) as store:
        store.set("whole", "kept")
        size = Path(url.removeprefix("file://")).stat().st_size
        # The kernel cuts the write at the limit; trying to write more ends this process for good.
        signal.signal(signal.SIGXFSZ, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + num_bytes_written, size + num_bytes_written))
        store.set("torn", b"x" * 5000)


# Within the header, right after it, within the key, within the value.
@pytest.mark.parametrize("num_bytes_written", [1, 15, 16, 22, 3000])
def test_a_writer_killed_within_a_write_harms_nobody(world: World, tmp_path: Path, num_bytes_written: int) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri(), timeout_s=5) as store:
        store.set("before", "1")
        (outcome,) = world.outcomes(die_within_a_write, path.as_uri(), num_bytes_written, num_ranks=1, backend=None)
        assert outcome.exit_code == -signal.SIGKILL
        whole_bytes = path.stat().st_size - num_bytes_written
        assert store.get("whole") == b"kept"
        assert not store.contains("torn")
        assert store.num_keys() == 2
        assert path.stat().st_size == whole_bytes + num_bytes_written, "reading must not change the file"
        store.set("after", "2")
    with open_store(path.as_uri()) as reopened:
        assert reopened.multi_get(["before", "whole", "after"]) == [b"1", b"kept", b"2"]
        assert reopened.num_keys() == 3


def write_until_killed(url: str, acknowledged: str, num_killed: int) -> int:
    """Ranks above 0 write and note each write they were told is done; rank 0 kills them and checks their notes."""
    rank = int(os.environ["RANK"])
    with open_store(url) as store:
        if rank:
            store.set(f"pid/{rank}", str(os.getpid()))
            with Path(f"{acknowledged}.{rank}").open("w", buffering=1) as notes:
                for index in range(1_000_000):
                    store.set(f"{rank}/{index}", b"v" * (index % 4000))
                    notes.write(f"{rank}/{index}\n")
        for victim in range(1, num_killed + 1):
            store.wait([f"{victim}/{40 * victim}"])
            os.kill(int(store.get(f"pid/{victim}")), signal.SIGKILL)
        num_checked = 0
        for victim in range(1, num_killed + 1):
            for line in Path(f"{acknowledged}.{victim}").read_text().split():
                assert len(store.get(line, timeout_s=0)) == int(line.split("/")[1]) % 4000
                num_checked += 1
        return num_checked


def test_what_was_acknowledged_survives_the_death_of_its_writer(world: World, tmp_path: Path) -> None:
    url, notes = (tmp_path / "job.store").as_uri(), str(tmp_path / "notes")
    outcomes = world.outcomes(write_until_killed, url, notes, 3, num_ranks=4, backend=None)
    assert outcomes[0].is_ok, outcomes[0].trace
    assert outcomes[0].value >= 40 + 80 + 120
    assert [outcome.exit_code for outcome in outcomes[1:]] == [-signal.SIGKILL] * 3


def write_or_watch(url: str, num_writes: int) -> int:
    """Rank 0 writes the same key over and over; the others see it count up and never vanish."""
    with open_store(url) as store:
        if os.environ["RANK"] == "0":
            for index in range(num_writes):
                store.set("key", f"{index:06d}" + "x" * 20_000)
            return num_writes
        last = -1
        while last < num_writes - 1:
            now = int(store.get("key")[:6])
            assert now >= last
            last = now
        return last + 1


def test_the_file_is_rewritten_while_others_read_it(world: World, tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    assert world.run(write_or_watch, path.as_uri(), 300, num_ranks=3, backend=None) == [300] * 3
    assert path.stat().st_size < 2**20, "300 values of 20 kB were written; what remains is the last few"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["job.store", "job.store.lock"]


def test_expired_and_deleted_keys_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri()) as store:
        for index in range(60):
            store.set(f"lease/{index}", b"x" * 50_000, ttl_s=1e-6)
            store.set(f"gone/{index}", b"x" * 50_000)
            store.delete(f"gone/{index}")
    assert path.stat().st_size < 2**20


@pytest.mark.parametrize("position", [9, 20, 40], ids=["length", "header checksum", "value"])
def test_a_flipped_byte_is_reported_not_obeyed(tmp_path: Path, position: int) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri()) as store:
        store.set("key", "a value that is long enough")
        store.set("later", "1")
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(IoError, match="damaged"):
        open_store(path.as_uri())


def test_damage_found_while_reading_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri()) as store, open_store(path.as_uri()) as writer:
        offset = path.stat().st_size
        writer.set("key", "a value that is long enough")
        with path.open("r+b") as file:
            file.seek(offset + 30)
            file.write(b"#")
        with pytest.raises(IoError, match="damaged"):
            store.contains("key")


def test_a_file_that_is_not_a_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("do not touch this")
    with pytest.raises(IoError, match="not a store"):
        open_store(path.as_uri())
    assert path.read_text() == "do not touch this"


@pytest.mark.parametrize("path", ["/sys/job.store", "/no/such/folder/job.store"])
def test_a_place_that_cannot_be_written_is_reported(path: str) -> None:
    with pytest.raises(IoError, match="must exist and be writable"):
        open_store(f"file://{path}")


def test_a_full_disk_is_reported_and_nothing_is_half_written(world: World, tmp_path: Path) -> None:
    assert world.run(meet_the_size_limit, (tmp_path / "job.store").as_uri(), num_ranks=1, backend=None) == [True]


def meet_the_size_limit(url: str) -> bool:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open_store(url) as store:
        store.set("small", "1")
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(IoError, match="cannot be used"):
            store.set("large", b"x" * 2000)
        assert not store.contains("large")
        assert store.get("small") == b"1"
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        store.set("large", b"x" * 2000)
        return store.get("large") == b"x" * 2000 and store.num_keys() == 2


def test_a_lock_that_is_never_released_ends_in_a_timeout_for_writers_only(tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri(), timeout_s=0.3) as store:
        store.set("key", "1")
        with (tmp_path / "job.store.lock").open("r+b") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            began = time.monotonic()
            with pytest.raises(OperationTimeout, match="holds the lock"):
                store.set("key", "2")
            assert time.monotonic() - began >= 0.3
            assert store.get("key") == b"1"
        store.set("key", "3")


def test_a_deleted_store_begins_afresh(tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri()) as store:
        store.set("key", "1")
        path.unlink()
        (tmp_path / "job.store.lock").unlink()
        assert not store.contains("key")
        store.set("other", "2")
        assert store.num_keys() == 1
    with open_store(path.as_uri()) as reopened:
        assert reopened.get("other") == b"2"


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    open_store(path.as_uri()).close()
    for made in tmp_path.iterdir():
        assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_a_refused_value_is_not_logged(tmp_path: Path) -> None:
    path = tmp_path / "job.store"
    with open_store(path.as_uri()) as store:
        store.set("text", "abc")
        size = path.stat().st_size
        with pytest.raises(InvalidArgument):
            store.add("text", 1)
        assert not store.compare_and_swap("text", "other", "new")
        assert not store.delete("absent")
        assert path.stat().st_size == size


def test_expiry_from_another_boot_goes_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    expires_at = time.monotonic() + 600
    body = file_log._encode("lease", StoredValue(b"1", expires_at))[file_log._HEADER.size :]
    an_hour_later = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: an_hour_later)
    assert file_log._decode(body) == ("lease", StoredValue(b"1", expires_at)), (
        "the same boot goes by its monotonic clock"
    )
    monkeypatch.setattr(file_log, "_boot_id", lambda: b"another-boot-id!")
    _, entry = file_log._decode(body)
    assert entry is not None
    assert entry.expires_at == pytest.approx(expires_at - 3600, abs=30)


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
