"""Where ranks live, packed: nothing is lost, and patterns of thousands take few bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.meeting.node_packing import pack_nodes, unpack_nodes


@given(nodes=st.lists(st.sampled_from("abcdef"), max_size=40))
def test_ranks_share_a_node_after_unpacking_if_they_did_before(nodes: list[str]) -> None:
    order = list(dict.fromkeys(nodes))
    assert unpack_nodes(pack_nodes(nodes)) == tuple(order.index(node) for node in nodes)


def test_ten_thousand_ranks_in_a_pattern_take_few_bytes() -> None:
    node_by_node = [f"node {rank // 8}" for rank in range(10_000)]
    in_turn = [f"node {rank % 1250}" for rank in range(10_000)]
    assert max(len(pack_nodes(nodes)) for nodes in (node_by_node, in_turn)) < 300
