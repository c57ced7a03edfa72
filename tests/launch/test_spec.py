from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.launch.spec import Entry, JobSpec, parse_endpoint, parse_nnodes, parse_nproc

ENTRY = Entry(target="train.py")


@given(nnodes=st.integers(1, 20), nproc=st.integers(1, 20))
def test_the_nodes_together_hold_every_rank_once(nnodes: int, nproc: int) -> None:
    places = [
        place
        for node_rank in range(nnodes)
        for place in JobSpec(entry=ENTRY, nnodes=nnodes, nproc_per_node=nproc, node_rank=node_rank).places()
    ]
    assert [place.rank for place in places] == list(range(nnodes * nproc))
    assert all(place.rank == place.node_rank * nproc + place.local_rank for place in places)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node must be at least 1"),
        ({"nproc_per_node": 10**12}, "a node has at most 4096 workers"),
        ({"nnodes": 0}, "nnodes must be at least 1"),
        ({"max_restarts": -1}, "max_restarts must be at least 0"),
        ({"nnodes": 2, "node_rank": 2}, "node rank 2 is outside the 2 nodes"),
        ({"node_rank": -1}, "node rank -1 is outside"),
        ({"master_port": 65536}, "between 0 and 65535"),
        ({"nnodes": 2, "master_port": 0}, "must be known to all of them"),
        ({"run_id": "a/b"}, "letters, digits"),
        ({"run_id": ""}, "letters, digits"),
        ({"shutdown_timeout_s": 0.0}, "positive number of seconds"),
        ({"join_timeout_s": float("nan")}, "positive number of seconds"),
    ],
)
def test_a_spec_that_cannot_run_is_refused_when_it_is_made(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        JobSpec(entry=ENTRY, **wrong)  # type: ignore[arg-type]


def test_nproc_counts_what_the_node_has() -> None:
    assert parse_nproc("3") == 3
    assert parse_nproc("cpu") == len(os.sched_getaffinity(0))
    assert parse_nproc("auto") >= 1


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", "٣"])
def test_nproc_that_is_no_number_of_processes_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="nproc-per-node"):
        parse_nproc(text)


def test_nnodes_takes_a_number_or_an_empty_range() -> None:
    assert parse_nnodes("2") == 2
    assert parse_nnodes("3:3") == 3
    with pytest.raises(FeatureNotAvailable, match="fixed"):
        parse_nnodes("1:4")
    for wrong in ("0", "x", ":"):
        with pytest.raises(InvalidArgument, match="nnodes"):
            parse_nnodes(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0", ("node0", None)),
        ("node0:29500", ("node0", 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
        ("[fd00::1]", ("fd00::1", None)),
        ("fd00::1", ("fd00::1", None)),
    ],
)
def test_an_endpoint_is_an_address_and_perhaps_a_port(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "host:port", "[fd00::1", "[fd00::1]x"])
def test_an_endpoint_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        parse_endpoint(text)
