"""The chain of chunks, played without messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.algorithms.pipelined import chain_moves


@given(size=st.integers(min_value=1, max_value=9), num_chunks=st.integers(min_value=1, max_value=12))
def test_a_chain_never_waits_in_a_circle(size: int, num_chunks: int) -> None:
    """Play the moves of all ranks with messages that wait for their receiver: everybody gets to the end."""
    moves = [list(chain_moves(position, size, num_chunks)) for position in range(size)]
    ups: list[list[int]] = [[] for _ in range(size)]
    downs: list[list[int]] = [[] for _ in range(size)]
    done = [0] * size
    while True:
        before = list(done)
        for here in range(size):
            while done[here] < len(moves[here]):
                move, chunk = moves[here][done[here]]
                inbox = ups if move == "up" else downs
                is_source = here == (0 if move == "up" else size - 1)
                if not is_source:
                    if not inbox[here] or inbox[here][0] != chunk:
                        break
                    inbox[here].pop(0)
                following = here + (1 if move == "up" else -1)
                if 0 <= following < size:
                    inbox[following].append(chunk)
                done[here] += 1
        if done == before:
            break
    assert done == [2 * num_chunks] * size
    assert not any(ups)
    assert not any(downs)
