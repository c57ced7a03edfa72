"""Remote calls from the beginning: numbers, matrices, objects, streams, errors and many calls at once.

    torsh run --nproc-per-node 2 examples/remote/tutorial.py

Worker 1 offers functions, worker 0 calls them. Both run this file.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from torsh_distributed import rpc


@rpc.expose(inline=True)  # takes a microsecond: it runs where the call is read
def add(left: float, right: float) -> float:
    """A sum."""
    return left + right


@rpc.expose
def multiply(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices."""
    return left @ right


@rpc.expose
def divide(left: float, right: float) -> float:
    """May fail."""
    return left / right


@rpc.expose
def powers(base: int, count: int) -> Iterator[int]:
    """One after the other."""
    for exponent in range(count):
        yield base**exponent


@rpc.expose(most_at_once=1)  # its methods never run at the same time
class Account:
    """An object that stays where it is made."""

    def __init__(self) -> None:
        self.balance = 0

    def deposit(self, amount: int) -> int:
        """The new balance."""
        self.balance += amount
        return self.balance


done = threading.Event()


@rpc.expose
def finish() -> None:
    """Worker 0 needs worker 1 no longer."""
    done.set()


async def add_many() -> float:
    """Sixty-four calls under way at once."""
    return sum(await asyncio.gather(*(rpc.call_async("worker1", add, (i, 1)) for i in range(64))))


def main() -> None:
    """Worker 0."""
    print("maths:", rpc.call("worker1", add, (2, 3)))

    left, right = torch.rand(300, 200), torch.rand(200, 100)
    product = rpc.call("worker1", multiply, (left, right))
    print("matrices:", tuple(product.shape), "as here:", torch.allclose(product, left @ right))

    account = rpc.remote("worker1", Account)
    futures = [account.call_async("deposit", (10,)) for _ in range(5)]
    print("objects:", max(future.result() for future in futures))

    print("streams:", list(rpc.stream("worker1", powers, (2, 8))))

    try:
        rpc.call("worker1", divide, (1, 0))
    except ZeroDivisionError as error:  # the callee's type, with its traceback
        print("errors:", error.args[0], "in divide" in "".join(error.__notes__))

    print("concurrency:", asyncio.run(add_many()))
    rpc.call("worker1", finish)


if __name__ == "__main__":
    rank = int(os.environ.get("RANK", "0"))
    rpc.start(f"worker{rank}")
    if rank == 0:
        rpc.wait_for_workers(["worker1"])
        main()
    else:
        done.wait(120)
    rpc.shutdown()
