"""Two ends prove a secret to each other: who has it gets in, and nothing recorded helps anyone else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.trust.handshake import HELLO_BYTES, MAC_BYTES, Handshake, NotAMember

MAGIC = b"TORSHXX1"


def ends(
    server_secret: bytes = b"s", client_secret: bytes = b"s", *, server_signs: bool = False, client_signs: bool = False
) -> tuple[Handshake, Handshake]:
    server = Handshake(server_secret, MAGIC, is_server=True, wants_signing=server_signs)
    client = Handshake(client_secret, MAGIC, is_server=False, wants_signing=client_signs)
    return server, client


def meet(server: Handshake, client: Handshake) -> None:
    server.feed(client.feed(server.feed(client.opening)))


@pytest.mark.parametrize("server_signs", [False, True])
@pytest.mark.parametrize("client_signs", [False, True])
def test_one_side_that_wants_signing_is_enough(server_signs: bool, client_signs: bool) -> None:
    server, client = ends(server_signs=server_signs, client_signs=client_signs)
    meet(server, client)
    assert server.is_done
    assert client.is_done
    assert server.is_signed == client.is_signed == (server_signs or client_signs)
    assert (server.signers() is not None) == server.is_signed


def test_a_client_without_the_secret_finds_out_and_sends_no_proof() -> None:
    server, client = ends(b"right", b"wrong")
    with pytest.raises(NotAMember, match="does not have the job's secret"):
        client.feed(server.feed(client.opening))


def test_a_proof_without_the_secret_is_refused() -> None:
    server, client = ends()
    server.feed(client.opening)
    with pytest.raises(NotAMember, match="does not have the job's secret"):
        server.feed(b"\0" * MAC_BYTES)
    assert not server.is_done


def test_a_proof_of_an_earlier_connection_is_worth_nothing() -> None:
    server, client = ends()
    opening = client.opening
    proof = client.feed(server.feed(opening))
    server.feed(proof)
    again, _ = ends()
    again.feed(opening)
    with pytest.raises(NotAMember):
        again.feed(proof)


def test_the_servers_own_words_do_not_prove_anything_to_it() -> None:
    server, client = ends()
    reply = server.feed(client.opening)
    with pytest.raises(NotAMember):
        server.feed(reply[HELLO_BYTES:])


def test_a_proof_for_one_protocol_is_none_for_another() -> None:
    server = Handshake(b"s", b"TORSHYY1", is_server=True, wants_signing=False)
    _, client = ends()
    with pytest.raises(NotAMember, match="different protocol"):
        server.feed(client.opening)


def test_who_asks_for_no_signing_on_the_way_is_found_out() -> None:
    server, client = ends(client_signs=True)
    changed = bytearray(client.opening)
    changed[len(MAGIC)] = 0
    with pytest.raises(NotAMember):
        client.feed(server.feed(bytes(changed)))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_the_handshake_does_not_depend_on_how_the_stream_is_cut(sizes: list[int]) -> None:
    server, client = ends(server_signs=True)
    reply = b""
    data = client.opening
    for size in sizes:
        reply += server.feed(data[:size])
        data = data[size:]
    reply += server.feed(data)
    server.feed(client.feed(reply) + b"what follows")
    assert server.is_done
    assert server.rest == b"what follows"


@given(garbage=st.binary(min_size=8, max_size=200))
def test_garbage_is_refused_and_nothing_is_kept_of_it(garbage: bytes) -> None:
    server, _ = ends()
    with pytest.raises(NotAMember):
        server.feed(garbage)


def test_messages_are_signed_in_order_by_direction() -> None:
    server, client = ends(server_signs=True)
    meet(server, client)
    ours, theirs = server.signers(), client.signers()
    assert ours is not None
    assert theirs is not None
    (server_sends, server_receives), (client_sends, client_receives) = ours, theirs
    first, second = client_sends.sign(b"one"), client_sends.sign(b"two")
    server_receives.check(first, b"one")
    server_receives.check(second, b"two")
    with pytest.raises(NotAMember, match="not the next one"):
        server_receives.check(second, b"two")
    with pytest.raises(NotAMember):  # sent back to its sender
        client_receives.check(first, b"one")
    assert server_sends.sign(b"one") != first
