from __future__ import annotations

import threading

from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.nodes.heartbeat import HeartbeatSender


def test_a_loop_that_is_busy_still_gives_signs_of_life_and_then_blames_nobody() -> None:
    sent, checked = threading.Semaphore(0), threading.Event()
    with Loop() as loop:
        heartbeat = HeartbeatSender(loop, 0.2, send=sent.release, check=checked.set)

        def be_busy() -> None:
            for _ in range(5):  # five beats are a whole timeout
                assert sent.acquire(timeout=30)
            checked.clear()
            # Due after the check that this callback delayed.
            loop.call_later(0, lambda: loop.stop(int(checked.is_set())))

        loop.call_later(0, be_busy)
        assert loop.run() == 0, "it was busy longer than half a timeout, so what others sent is unread"
        heartbeat.stop()


def test_a_loop_that_turns_looks_at_the_others() -> None:
    with Loop() as loop:
        heartbeat = HeartbeatSender(loop, 5.0, send=lambda: None, check=lambda: loop.stop(7))
        assert loop.run() == 7
        heartbeat.stop()
