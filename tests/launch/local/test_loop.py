from __future__ import annotations

import os
import signal

import pytest

from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.local.signals import SignalInbox


def test_timers_fire_in_order_and_cancelled_ones_do_not() -> None:
    fired: list[str] = []
    with Loop() as loop:
        loop.call_later(0.02, lambda: (fired.append("late"), loop.stop(3)))
        loop.call_later(0.01, lambda: fired.append("early"))
        loop.call_later(0.015, lambda: fired.append("never")).cancel()
        assert loop.run() == 3
    assert fired == ["early", "late"]


def test_a_readable_descriptor_calls_back_until_it_is_unwatched() -> None:
    read, write = os.pipe()
    seen: list[bytes] = []
    with Loop() as loop:

        def take() -> None:
            seen.append(os.read(read, 1))
            if seen[-1] == b"c":
                loop.unwatch(read)
                loop.stop(0)

        loop.watch(read, take)
        os.write(write, b"abcd")
        loop.run()
    os.close(read)
    os.close(write)
    assert seen == [b"a", b"b", b"c"]


def test_a_descriptor_removed_by_an_earlier_callback_is_not_served() -> None:
    pipes = [os.pipe() for _ in range(2)]
    served: list[int] = []
    with Loop() as loop:

        def serve(mine: int, other: int) -> None:
            served.append(mine)
            loop.unwatch(mine)
            loop.unwatch(other)
            loop.call_later(0.01, lambda: loop.stop(0))

        first, second = pipes[0][0], pipes[1][0]
        loop.watch(first, lambda: serve(first, second))
        loop.watch(second, lambda: serve(second, first))
        for _, write in pipes:
            os.write(write, b"x")
        loop.run()
    for pair in pipes:
        os.close(pair[0])
        os.close(pair[1])
    assert len(served) == 1


def test_an_error_in_a_callback_leaves_the_loop() -> None:
    with Loop() as loop:
        loop.call_later(0, lambda: {}["absent"])
        with pytest.raises(KeyError):
            loop.run()


def test_signals_wait_in_the_inbox_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with SignalInbox() as inbox:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert sorted(inbox.take()) == sorted([signal.SIGTERM, signal.SIGUSR1])
        assert inbox.take() == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_ignored_from_the_start_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.take() == []
    finally:
        signal.signal(signal.SIGHUP, previous)
