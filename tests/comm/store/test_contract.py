"""The contract of every store, held against all four kinds."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.comm.store.conftest import Place
from torsh_distributed.comm.store import MAX_VALUE_BYTES, Store, StoreTimeout, Swap, file, redis
from torsh_distributed.errors import InvalidArgument, OperationTimeout

pytestmark = pytest.mark.ranks

TTL_S = 0.25
# Redis counts in whole milliseconds.
CLOCK_STEP_S = 0.01


def write_with_ttl(write: Callable[[], object]) -> float:
    """Do the write and return the monotonic time by which it must have expired."""
    write()
    return time.monotonic() + TTL_S + CLOCK_STEP_S


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def test_a_value_comes_back_as_bytes(store: Store) -> None:
    store.set("bytes", b"\x00\xff")
    store.set("text", "grüße")
    store.set("empty", b"")
    assert store.get("bytes") == b"\x00\xff"
    assert store.get("text") == "grüße".encode()
    assert store.get("empty") == b""


def test_a_pickle_is_bytes_like_any_other(store: Store) -> None:
    harmful = pickle.dumps(pytest.fail)
    store.set("key", harmful)
    assert store.get("key") == harmful


def test_the_last_write_wins(store: Store) -> None:
    store.set("key", "first")
    store.set("key", "second")
    assert store.get("key") == b"second"
    assert store.num_keys() == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("late", "1"),
        lambda store: store.set("late", "1", ttl_s=60),
        lambda store: store.add("late", 1),
        lambda store: store.append("late", "1"),
        lambda store: store.compare_and_swap("late", None, "1"),
    ],
    ids=["set", "set with ttl", "add", "append", "swap"],
)
def test_every_kind_of_write_wakes_who_waits(
    store: Store, write: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without looking again on their own, so that nothing but the write can end the wait.
    monkeypatch.setattr(file, "_RECHECK_S", 60.0)
    monkeypatch.setattr(redis, "_RECHECK_S", 60.0)
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(store.get, "late", timeout_s=40) for _ in range(2)]
        time.sleep(0.05)  # so that they are most likely blocked, not about to look
        write(store)
        assert [reader.result(timeout=20) for reader in readers] == [b"1", b"1"]


def test_a_blocked_get_does_not_hold_up_other_threads(store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(store.get, f"late/{index}") for index in range(4)]
        for round_ in range(20):
            store.set("other", str(round_))
        assert store.get("other") == b"19"
        for index in range(4):
            store.set(f"late/{index}", str(index))
        assert [reader.result(timeout=10) for reader in readers] == [b"0", b"1", b"2", b"3"]


def test_a_get_that_times_out_names_the_key(store: Store) -> None:
    with pytest.raises(OperationTimeout, match="nobody/sets/this") as caught:
        store.get("nobody/sets/this", timeout_s=0.05)
    assert caught.value.context["missing_keys"] == ["nobody/sets/this"]


def test_the_stores_own_timeout_is_the_default(store: Store) -> None:
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(StoreTimeout):
        store.get("absent")
    with pytest.raises(StoreTimeout):
        store.wait(["absent"])


def test_a_timeout_of_zero_asks_once(store: Store) -> None:
    with pytest.raises(StoreTimeout):
        store.get("absent", timeout_s=0)
    store.set("present", "1")
    assert store.get("present", timeout_s=0) == b"1"
    store.wait(["present"], 0)


def test_wait_names_only_the_missing_keys(store: Store) -> None:
    store.set("b", "1")
    with pytest.raises(StoreTimeout) as caught:
        store.wait(["a", "b", "c"], 0.05)
    assert caught.value.context["missing_keys"] == ["a", "c"]


def test_wait_returns_once_all_keys_are_there(store: Store) -> None:
    store.set("a", "1")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["a", "b", "c", "b"], 10)
        store.add("c", 1)
        store.compare_and_swap("b", None, "1")
        assert waiting.result(timeout=10) is None


def test_several_keys_are_read_together_and_waited_for(store: Store) -> None:
    store.multi_set(["b", "a"], ["2", b"1"])
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.multi_get, ["a", "late", "b", "a"])
        store.set("late", "3")
        assert reading.result(timeout=20) == [b"1", b"3", b"2", b"1"]
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(StoreTimeout) as caught:
        store.multi_get(["a", "absent"])
    assert caught.value.context["missing_keys"] == ["absent"]


def test_asking_for_nothing_returns_at_once(store: Store) -> None:
    store.wait([], 0)
    assert store.check([])
    assert store.multi_get([]) == []


def test_delete_says_whether_the_key_was_there(store: Store) -> None:
    store.set("key", "1")
    assert store.delete("key") is True
    assert store.delete("key") is False
    assert not store.contains("key")
    assert store.num_keys() == 0


def test_a_swap_on_a_missing_key_needs_none(store: Store) -> None:
    refused = store.compare_and_swap("key", b"", "new")
    assert not refused
    assert refused.value is None
    assert not store.contains("key")
    done = store.compare_and_swap("key", None, "new")
    assert done
    assert done.value == b"new"
    assert store.get("key") == b"new"


def test_a_failed_swap_writes_nothing_and_shows_the_value(store: Store) -> None:
    store.set("key", "old")
    for expected in (None, b"", b"other"):
        swap = store.compare_and_swap("key", expected, "new")
        assert (swap.swapped, swap.value) == (False, b"old")
    assert store.get("key") == b"old"
    assert store.compare_and_swap("key", "old", "new")
    assert store.get("key") == b"new"


def test_an_empty_value_is_a_value(store: Store) -> None:
    store.set("key", b"")
    assert not store.compare_and_swap("key", None, "new")
    assert store.compare_and_swap("key", b"", "new")


def test_a_swap_that_another_has_done_already_is_a_failed_swap(store: Store) -> None:
    store.set("counter", "6")
    swap = store.compare_and_swap("counter", "5", "6")
    assert (swap.swapped, swap.value) == (False, b"6")


def test_a_counter_begins_at_zero_and_reads_as_text(store: Store) -> None:
    assert store.add("counter", 0) == 0
    assert store.add("counter", 5) == 5
    assert store.add("counter", -7) == -2
    assert store.get("counter") == b"-2"
    store.set("counter", "40")
    assert store.add("counter", 2) == 42


@pytest.mark.parametrize("text", ["", "abc", "1.5", " 5", "+5", "05", "-0", "1_000", "9223372036854775808"])
def test_add_refuses_what_is_not_a_number(store: Store, text: str) -> None:
    store.set("key", text)
    with pytest.raises(InvalidArgument, match="decimal"):
        store.add("key", 1)
    assert store.get("key") == text.encode()
    assert store.add("other", 1) == 1


def test_add_stays_within_64_bits(store: Store) -> None:
    top = 2**63 - 1
    assert store.add("counter", top) == top
    with pytest.raises(InvalidArgument, match="64 bits"):
        store.add("counter", 1)
    assert store.get("counter") == str(top).encode()
    assert store.add("counter", -top) == 0
    with pytest.raises(InvalidArgument, match="64-bit"):
        store.add("counter", 2**63)


def test_append_lengthens_a_value_that_begins_empty(store: Store) -> None:
    store.append("log", "one ")
    store.append("log", b"two")
    assert store.get("log") == b"one two"


def test_an_expired_key_is_absent_to_every_operation(store: Store) -> None:
    began = time.monotonic()
    gone = 0.0
    for key in ("get", "swap", "add", "append", "delete", "wait"):
        gone = write_with_ttl(lambda key=key: store.set(key, "7", ttl_s=TTL_S))  # type: ignore[misc]
    visible = store.check(["get", "wait"])
    assert visible or time.monotonic() - began >= TTL_S
    sleep_until(gone)
    assert store.num_keys() == 0
    assert not store.contains("get")
    with pytest.raises(StoreTimeout):
        store.get("get", timeout_s=0)
    with pytest.raises(StoreTimeout):
        store.wait(["wait"], 0.02)
    assert not store.delete("delete")
    assert store.compare_and_swap("swap", None, "new")
    assert store.add("add", 1) == 1
    store.append("append", "x")
    assert store.get("append") == b"x"


def test_a_waiter_is_woken_when_an_expired_key_is_written_anew(store: Store) -> None:
    sleep_until(write_with_ttl(lambda: store.set("lease", "old", ttl_s=TTL_S)))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "lease")
        store.set("lease", "new")
        assert waiting.result(timeout=10) == b"new"


def test_writing_without_a_ttl_makes_a_key_permanent(store: Store) -> None:
    store.set("set", "1", ttl_s=TTL_S)
    store.set("set", "2")
    store.set("swap", "1", ttl_s=10)
    assert store.compare_and_swap("swap", "1", "2")
    gone = write_with_ttl(lambda: store.set("control", "1", ttl_s=TTL_S))
    sleep_until(gone)
    assert store.check(["set", "swap"])
    assert not store.contains("control")


def test_add_and_append_keep_the_time_to_live(store: Store) -> None:
    began = time.monotonic()
    store.compare_and_swap("counter", None, "1", ttl_s=TTL_S)
    gone = write_with_ttl(lambda: store.set("log", "1", ttl_s=TTL_S))
    store.add("counter", 1)
    store.append("log", "2")
    # On a machine that stalls this long, add and append began new, permanent keys.
    was_in_time = time.monotonic() - began < TTL_S
    sleep_until(gone)
    assert store.num_keys() == 0 or not was_in_time


def test_a_swap_can_renew_a_lease(store: Store) -> None:
    assert store.compare_and_swap("leader", None, "rank 1", ttl_s=TTL_S)
    first_term_over = time.monotonic() + TTL_S + CLOCK_STEP_S
    renewed = store.compare_and_swap("leader", "rank 1", "rank 1", ttl_s=30)
    sleep_until(first_term_over)
    # A machine that stalls for a whole term loses the lease; then, and only then, the renewal must have failed.
    assert store.contains("leader") == renewed.swapped


def test_a_prefix_sees_and_counts_its_own_keys_only(store: Store) -> None:
    mine, other = store.prefix("job[7]*"), store.prefix("job")
    mine.set("a", "1")
    mine.prefix("deep").set("b", "2")
    other.set("a", "3")
    store.set("job[7]*x", "4")
    assert mine.num_keys() == 2
    assert mine.prefix("deep").num_keys() == 1
    assert other.num_keys() == 1
    assert store.num_keys() == 4
    assert mine.get("deep/b") == b"2"
    assert store.get("job[7]*/a") == b"1"
    with pytest.raises(StoreTimeout) as caught:
        mine.wait(["nothing"], 0)
    assert caught.value.context["missing_keys"] == ["nothing"]


def test_the_largest_value_passes_and_one_more_byte_does_not(store: Store) -> None:
    largest = b"x" * MAX_VALUE_BYTES
    store.set("large", largest)
    assert store.get("large") == largest
    with pytest.raises(InvalidArgument, match=str(MAX_VALUE_BYTES + 1)):
        store.set("larger", largest + b"x")
    with pytest.raises(InvalidArgument, match=str(MAX_VALUE_BYTES + 1)):
        store.append("large", "x")
    assert not store.contains("larger")
    assert store.delete("large")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda store: store.set("", "1"), "a key is a text"),
        (lambda store: store.set(b"key", "1"), "a key is a text"),
        (lambda store: store.set("\ud800", "1"), "valid Unicode"),
        (lambda store: store.set("k" * 2**17, "1"), "65536 bytes at most"),
        (lambda store: store.set("key", 1), "bytes or text"),
        (lambda store: store.set("key", "1", ttl_s=0), "time to live"),
        (lambda store: store.set("key", "1", ttl_s=float("nan")), "time to live"),
        (lambda store: store.get("key", timeout_s=-1), "timeout"),
        (lambda store: store.wait(["key"], float("nan")), "timeout"),
        (lambda store: store.prefix(""), "a key is a text"),
        (lambda store: store.wait("key"), "a list of texts"),
        (lambda store: store.multi_set(["key"], []), "as many values"),
    ],
)
def test_mistakes_are_refused_with_a_reason(store: Store, mistake: Callable[[Store], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        mistake(store)
    assert store.num_keys() == 0


def test_a_closed_store_says_so(store: Store) -> None:
    view = store.prefix("view")
    store.close()
    store.close()
    for closed in (store, view):
        with pytest.raises(InvalidArgument, match="closed"):
            closed.set("key", "1")


def test_closing_a_view_leaves_the_store_open_and_frees_the_view(store: Store) -> None:
    with store.prefix("view") as view:
        view.set("key", "1")
    assert store.get("view/key") == b"1"
    remembered = weakref.ref(view)
    del view
    gc.collect()
    assert remembered() is None


def test_a_store_in_the_hands_of_c10d_stays_alive_until_it_is_closed(place: Place) -> None:
    store = place.open()
    remembered = weakref.ref(store)
    in_c10d = dist.PrefixStore("job", store.prefix("view"))
    del store
    gc.collect()
    in_c10d.set("key", "1")
    assert in_c10d.get("key") == b"1"
    opened = remembered()
    assert opened is not None
    opened.close()


def test_c10d_finds_every_operation_it_calls(store: Store) -> None:
    # A torch PrefixStore is C++: each call below goes through c10d into Python and back.
    c10d = dist.PrefixStore("c10d", store)
    c10d.set("a", "1")
    assert c10d.get("a") == b"1"
    assert c10d.add("n", 3) == 3
    assert c10d.check(["a", "n"])
    assert not c10d.check(["a", "absent"])
    assert c10d.num_keys() == 2
    assert c10d.delete_key("n")
    c10d.wait(["a"])
    c10d.wait(["a"], timedelta(seconds=1))
    c10d.append("log", "x")  # type: ignore[attr-defined]  # missing in torch's stubs
    c10d.multi_set(["p", "q"], ["1", "2"])  # type: ignore[attr-defined]
    assert c10d.multi_get(["p", "q", "log"]) == [b"1", b"2", b"x"]
    assert c10d.has_extended_api()  # type: ignore[attr-defined]
    assert c10d.clone().get("a") == b"1"  # type: ignore[attr-defined]
    assert store.prefix("c10d").get("a") == b"1"


def test_compare_set_answers_as_torchs_own_store_does(store: Store) -> None:
    for subject in (dist.PrefixStore("ours", store), dist.PrefixStore("torch", dist.HashStore())):
        answers = [
            subject.compare_set("key", "absent", "x"),
            subject.compare_set("key", "", "1"),
            subject.compare_set("key", "", "2"),
            subject.compare_set("key", "1", "2"),
            subject.compare_set("key", "1", "3"),
        ]
        subject.set("key", "")
        answers.append(subject.compare_set("key", "", "4"))
        assert answers == [b"absent", b"1", b"1", b"2", b"2", b"4"]


def test_a_timeout_inside_c10d_is_one_that_c10d_knows(store: Store) -> None:
    # c10d's barrier over the store retries on RuntimeError and nothing else.
    with pytest.raises(dist.DistStoreError) as caught:
        dist.PrefixStore("c10d", store).wait(["absent"], timedelta(milliseconds=20))
    assert isinstance(caught.value, OperationTimeout)


def test_many_threads_lose_no_update(store: Store) -> None:
    begin = threading.Barrier(4)

    def work() -> int:
        begin.wait()
        for _ in range(25):
            store.add("sum", 1)
            while not (swap := increment(store, "swaps")):
                assert swap.value is not None
        return 25

    with ThreadPoolExecutor(4) as pool:
        total = sum(future.result() for future in [pool.submit(work) for _ in range(4)])
    assert store.get("sum") == store.get("swaps") == str(total).encode()


def increment(store: Store, key: str) -> Swap:
    current = store.get(key, timeout_s=0) if store.contains(key) else None
    return store.compare_and_swap(key, current, str(int(current or b"0") + 1))
