from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.clusters.hosted.rank_variables import (
    HostedEndpoint,
    joining_place,
    order_by_node,
    places_on,
    rank_variables,
)
from torsh_distributed.launch.worker.environment import read_environment

ENDPOINT = HostedEndpoint(
    engine="ray", name="job", attempt=2, max_restarts=3, master_addr="127.0.0.1", master_port=1234
)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_ranks_of_a_node_are_neighbours_and_count_from_zero(nodes: list[str]) -> None:
    order = order_by_node(nodes)
    assert sorted(order) == list(range(len(nodes)))
    ordered = [nodes[index] for index in order]
    places = places_on(ordered)
    assert [place.rank for place in places] == list(range(len(nodes)))
    for node in set(nodes):
        local = [place.local_rank for place, one in zip(places, ordered, strict=True) if one == node]
        ranks = [place.rank for place, one in zip(places, ordered, strict=True) if one == node]
        assert local == list(range(len(local)))
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks)))
    assert {place.node_rank for place in places} == set(range(len(set(nodes))))
    assert nodes[order[0]] == nodes[0], "the first host keeps rank 0"


def test_init_reads_them_and_names_the_engine() -> None:
    place = places_on(["a", "a", "b"])[2]
    found = read_environment(rank_variables(place, ENDPOINT, member=2))
    assert (found.source, found.rank, found.world_size) == ("Ray", 2, 3)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (0, 1, 1)
    assert (found.attempt, found.has_agent_store, found.master_port) == (2, True, 1234)


def test_a_worker_that_joins_has_a_number_beyond_the_world() -> None:
    place = joining_place(5, "b", ["a", "a", "b"])
    assert (place.rank, place.world_size, place.local_rank, place.node_rank) == (5, 6, 1, 1)
    assert rank_variables(place, ENDPOINT, member=5, joins=True)["TORSH_JOINS"] == "1"


_HOLD = """
import sys
from torsh_distributed.clusters.hosted.rank_variables import rank_folder
with rank_folder() as folder:
    (folder / "secret").write_text("hush")
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a rank's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_rank_left_goes_with_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    temporary, outside = tmp_path / "tmp", tmp_path / "outside"
    temporary.mkdir()
    outside.mkdir()
    (outside / "in-use").touch()
    (temporary / "torsh-rank-link").symlink_to(outside)
    (temporary / "torsh-rank-without-a-lock").mkdir()
    killed, left = hold(temporary)
    living, used = hold(temporary)
    killed.kill()
    killed.communicate()
    assert (left / "secret").exists()
    last, _ = hold(temporary)
    try:
        assert not left.exists()
        assert (used / "secret").exists()
        assert (outside / "in-use").exists()
        assert (temporary / "torsh-rank-without-a-lock").exists()
    finally:
        for process in (living, last):
            process.communicate("")
    assert not used.exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    private = tmp_path / "private.txt"
    private.write_text("mine")
    (tmp_path / "torsh-rank-forged").mkdir()
    (tmp_path / "torsh-rank-forged" / "in-use").symlink_to(private)
    process, _ = hold(tmp_path)
    process.communicate("")
    assert process.returncode == 0
    assert private.read_text() == "mine"
    assert (tmp_path / "torsh-rank-forged").exists()
    shutil.rmtree(tmp_path / "torsh-rank-forged")
