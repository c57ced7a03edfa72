"""One-sided memory: four processes count in a fifth one's memory, which sleeps and takes no part.

python examples/remote/counter.py
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import signal
import tempfile

import torch

from torsh_distributed import rpc

NUM_PROCESSES, NUM_ADDED = 4, 10_000


def own(url: str, ready: multiprocessing.synchronize.Event) -> None:
    """Allocates the counter, and is stopped by the others."""
    rpc.start("owner", store=url)
    rpc.window("counter", (1,), torch.int64)
    ready.set()
    signal.pause()


def count(url: str, number: int) -> None:
    """Adds without asking anybody."""
    rpc.start(f"counter{number}", store=url)
    counter = rpc.open_window("owner", "counter")
    for _ in range(NUM_ADDED):
        counter.fetch_and_add(0, 1)
    rpc.shutdown()


def main() -> None:
    """The owner is stopped by SIGSTOP while the others count."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        url, ready = f"file://{folder}/store", fork.Event()
        owner = fork.Process(target=own, args=(url, ready))
        owner.start()
        ready.wait(60)
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGSTOP)
        others = [fork.Process(target=count, args=(url, number)) for number in range(NUM_PROCESSES)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        rpc.start("reader", store=url)
        print(f"{NUM_PROCESSES} processes counted to", int(rpc.open_window("owner", "counter").get()[0]))
        rpc.shutdown()
        owner.kill()
        owner.join()


if __name__ == "__main__":
    main()
