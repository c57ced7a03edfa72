"""The sum is exact whoever is lost and whenever, each secret has one story, and a server that lies gets nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import CommunicationError, ConfigurationError, InvalidArgument, SerializationError
from torsh_distributed.federated import SecureAggregation
from torsh_distributed.federated.deployment.identity.device_identity import DeviceKey
from torsh_distributed.federated.privacy.secure_sum import sharing_plan as plans
from torsh_distributed.federated.privacy.secure_sum.mask_words import KeyPair
from torsh_distributed.federated.privacy.secure_sum.packed_words import pack_words, packed_bytes, unpack_words
from torsh_distributed.federated.privacy.secure_sum.secret_shares import join_shares, split_secret
from torsh_distributed.federated.privacy.secure_sum.sharing_plan import sharing_plan
from torsh_distributed.federated.privacy.secure_sum.sum_collector import SumCollector
from torsh_distributed.federated.privacy.secure_sum.sum_member import SumMember
from torsh_distributed.federated.privacy.secure_sum.sum_roster import SUM_STEPS, SumContext

pytestmark = pytest.mark.needs_library("cryptography")

NUMEL = 70
Tamper = Callable[[str, dict[str, bytes]], None]


class Keys:
    """Devices' keys, made once: they are the slowest part."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, DeviceKey] = {}

    def __getitem__(self, name: str) -> DeviceKey:
        if name not in self._known:
            self._known[name] = DeviceKey.load_or_make(self._directory / name)
        return self._known[name]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


class Round:
    """One sum with a collector and members in this process; messages go through bytes."""

    def __init__(self, keys: Keys, num_clients: int, *, round: int = 0, **changes: float) -> None:
        chosen = SecureAggregation(**changes)  # type: ignore[arg-type]
        self.context = SumContext(settings=chosen, fingerprint="f", numel=NUMEL, round=round, attempt=0)
        self.names = [f"d-{index:03}" for index in range(num_clients)]
        generator = torch.Generator().manual_seed(round)
        self.updates = {
            name: chosen.on_grid(torch.empty(NUMEL).uniform_(-1, 1, generator=generator)) for name in self.names
        }
        self.weights = {name: chosen.weight(1 + index) for index, name in enumerate(self.names)}
        identities = {name: keys[name].public for name in self.names}
        self.members = {
            name: SumMember(
                self.context,
                self.updates[name],
                self.weights[name],
                name=name,
                signer=keys[name],
                unknown=lambda shown: [name for name, key in shown.items() if identities.get(name) != key],
            )
            for name in self.names
        }
        self.collector = SumCollector(self.context, identities, 1)
        self.refused: dict[str, str] = {}

    def run(self, lost: Mapping[str, set[str]] | None = None, tamper: Tamper | None = None) -> tuple[Tensor, int]:
        """`lost`: who does not answer, by the step; `tamper` changes what the server sends."""
        lost = lost or {}
        for name in set(self.names) - lost.get("work", set()):
            self.collector.take_keys(name, self.members[name].keys())
        for step in SUM_STEPS:
            messages = self.collector.messages(step)
            if tamper is not None:
                tamper(step, messages)
            for name, payload in messages.items():
                if name in lost.get(step, set()):
                    continue
                try:
                    answer = self.members[name].answer(step, payload)
                except (ConfigurationError, SerializationError, InvalidArgument) as error:
                    self.refused[name] = error.message
                    continue
                self.collector.take(step, name, answer)
        return self.collector.total()

    def plain_sum(self, names: list[str]) -> tuple[Tensor, int]:
        """Integers of the grid, added one by one."""
        total = torch.zeros(NUMEL, dtype=torch.int64)
        for name in names:
            total += torch.round(self.updates[name].double() / self.context.settings.grid).long() * self.weights[name]
        return total, sum(self.weights[name] for name in names)


def assert_is_plain_sum(round: Round, found: tuple[Tensor, int]) -> None:
    expected, weight = round.plain_sum(round.collector.delivered)
    assert torch.equal(found[0], expected)
    assert found[1] == weight


# Parts


@settings(max_examples=40)
@given(secret=st.binary(min_size=32, max_size=32), data=st.data())
def test_enough_shares_give_the_secret_and_fewer_give_another(secret: bytes, data: st.DataObject) -> None:
    holders = data.draw(st.sets(st.integers(1, 60), min_size=2, max_size=12))
    threshold = data.draw(st.integers(2, len(holders)))
    shares = split_secret(secret, holders, threshold)
    some = data.draw(st.permutations(sorted(holders)))
    assert join_shares({holder: shares[holder] for holder in some[:threshold]}, threshold) == secret
    assert join_shares(shares, threshold) == secret
    assert join_shares({holder: shares[holder] for holder in some[: threshold - 1]}, threshold) is None
    # With one share fewer, every secret is as likely: the joined value is that of another polynomial.
    if threshold > 2:
        few = {holder: shares[holder] for holder in some[: threshold - 1]}
        assert join_shares(few, threshold - 1) != secret
    wrong = {**shares, some[0]: bytes(33)}
    assert join_shares({holder: wrong[holder] for holder in some[:threshold]}, threshold) != secret


@settings(max_examples=40)
@given(bits=st.integers(2, 32), count=st.integers(0, 130), seed=st.integers(0, 2**32 - 1))
def test_packed_words_come_back(bits: int, count: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    packed = pack_words(words, bits)
    assert len(packed) == packed_bytes(count, bits)
    np.testing.assert_array_equal(unpack_words(packed, count, bits), words & np.uint32(2**bits - 1))
    with pytest.raises(SerializationError, match="another size"):
        unpack_words(packed + b"x", count, bits)


def test_values_are_rounded_to_the_nearest_of_the_grid_and_refused_beyond() -> None:
    chosen = SecureAggregation(value_range=0.75, value_bits=12)
    values = torch.empty(1000).uniform_(-0.75, 0.75)
    found = chosen.on_grid(values)
    assert float((found - values).abs().max()) <= chosen.grid / 2 <= 0.75 / 2**11
    assert torch.equal(chosen.on_grid(found), found)
    assert torch.equal(chosen.steps(found).double() * chosen.grid, found.double())
    for wrong in (1.6, float("nan"), float("-inf")):
        with pytest.raises(InvalidArgument, match=r"beyond secure_aggregation\.value_range"):
            chosen.on_grid(torch.tensor([0.1, wrong]))
    with pytest.raises(ConfigurationError, match="needs 33 bits, and 32 are the most"):
        SecureAggregation(value_bits=24, most_samples=256).word_bits(2)


def test_plans_hold_against_the_corrupt_and_the_lost() -> None:
    small = sharing_plan(20, 0.2, 0.2)
    assert (small.num_neighbours, small.threshold, small.quorum) == (19, 13, 13)
    large = sharing_plan(1000, 0.2, 0.2)
    assert (large.num_neighbours, large.threshold, large.quorum) == (92, 55, 601)
    for num_clients in (3, 7, 20, 128, 129, 400):
        plan = sharing_plan(num_clients, 0.2, 0.2)
        # Two lists that different honest clients sign would need more signatures than there are.
        assert 2 * plan.quorum - num_clients > int(0.2 * num_clients)
        assert plan.threshold <= plan.num_neighbours + 1


# The sum


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_sum_is_exact_whoever_is_lost_at_whichever_step(data: st.DataObject, keys: Keys) -> None:
    num_clients = data.draw(st.integers(3, 9))
    round = Round(keys, num_clients, most_samples=data.draw(st.sampled_from([1, 5])))
    left = sorted(data.draw(st.permutations(round.names)))
    most_lost = num_clients - sharing_plan(num_clients, 0.2, 0.2).quorum
    num_lost = data.draw(st.integers(0, min(most_lost, num_clients - 3)))
    lost: dict[str, set[str]] = {}
    for name in data.draw(st.permutations(left))[:num_lost]:
        lost.setdefault(data.draw(st.sampled_from(["work", *SUM_STEPS])), set()).add(name)
    assert_is_plain_sum(round, round.run(lost))
    gone = set().union(*(lost.get(step, set()) for step in ("work", "roster", "sealed")))
    assert set(round.collector.delivered) == set(round.names) - gone
    assert round.refused == {}


@pytest.mark.parametrize("step", ["work", *SUM_STEPS])
def test_twenty_clients_may_lose_seven_at_any_step_and_not_eight(keys: Keys, step: str) -> None:
    round = Round(keys, 20)
    assert_is_plain_sum(round, round.run({step: set(round.names[3:10])}))
    num_left = 13 if step == "work" else 20
    if step == "work":
        return  # a round of twelve is a smaller round
    again = Round(keys, num_left)
    with pytest.raises(CommunicationError, match="only 12 of 20 clients have"):
        again.run({step: set(again.names[:8])})


@pytest.fixture
def _small_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A round is large from 31 clients on, and probabilities need not be as small: nearly 30,000 signatures fewer."""
    plans.sharing_plan.cache_clear()
    for name, value in {"_MOST_COMPLETE": 30, "_PRIVACY_BITS": 16, "_LOSS_BITS": 8}.items():
        monkeypatch.setattr(plans, name, value)
    yield
    plans.sharing_plan.cache_clear()


def check_large_round(round: Round) -> None:
    count = len(round.names)
    assert sharing_plan(count, 0.2, 0.2).num_neighbours < 0.8 * count
    few = count // 16
    places = {"roster": 0, "sealed": few * 3, "agreements": few * 7}
    assert_is_plain_sum(round, round.run({step: set(round.names[at : at + few]) for step, at in places.items()}))


@pytest.mark.usefixtures("_small_numbers")
def test_large_rounds_share_with_some_neighbours_only(keys: Keys) -> None:
    check_large_round(Round(keys, 48))


@pytest.mark.matrix
def test_a_round_of_more_than_128_shares_with_some_neighbours_only(keys: Keys) -> None:
    check_large_round(Round(keys, 130))


def test_an_upload_is_smaller_than_float32_and_looks_like_noise(keys: Keys) -> None:
    round = Round(keys, 20)
    assert packed_bytes(100_000, round.context.settings.word_bits(20)) <= 0.75 * 400_000
    uploads = []

    class Recorder(SumCollector):
        def take(self, step: str, name: str, payload: bytes) -> None:
            if step == "sealed":
                uploads.append(payload)
            super().take(step, name, payload)

    round.updates = {name: torch.zeros(NUMEL) for name in round.names}
    round.collector = Recorder(round.context, round.collector._identities, 1)
    round.run()
    bits = np.unpackbits(np.frombuffer(b"".join(uploads), dtype=np.uint8))
    used = len(bits) * NUMEL // 96  # the last group of words is padded with zeros
    assert abs(bits.sum() / used - 0.5) < 0.03
    assert len(set(uploads)) == 20


# Who lies


def collected(round: Round, until: str) -> dict[str, bytes]:
    """Play an honest round up to the step, and return what the server sends in it."""
    for name in round.names:
        round.collector.take_keys(name, round.members[name].keys())
    for step in SUM_STEPS:
        messages = round.collector.messages(step)
        if step == until:
            return messages
        for name, payload in messages.items():
            round.collector.take(step, name, round.members[name].answer(step, payload))
    raise AssertionError(until)


def test_a_client_gives_one_story_of_each_peer_and_gives_it_once(keys: Keys) -> None:
    round = Round(keys, 5)
    message = collected(round, "agreements")["d-000"]
    member = round.members["d-000"]
    seeds, lost_keys = deserialize(member.answer("agreements", message))
    assert (sorted(seeds), lost_keys) == ([1, 2, 3, 4, 5], {})
    for step in SUM_STEPS:
        with pytest.raises(ConfigurationError, match="each step is answered once"):
            member.answer(step, message)


def test_of_a_lost_client_the_key_is_opened_and_its_seed_never(keys: Keys) -> None:
    round = Round(keys, 5)
    round.run({"sealed": {"d-004"}})
    assert sorted(round.collector._seeds) == [1, 2, 3, 4]
    assert sorted(round.collector._lost_keys) == [5]


def test_a_server_that_tells_two_lists_gets_no_secret(keys: Keys) -> None:
    """It tells two of the ten that one client was lost, and the others that it delivered."""
    round = Round(keys, 10)

    def two_lists(step: str, messages: dict[str, bytes]) -> None:
        if step == "delivered":
            for name in ("d-000", "d-001"):
                messages[name] = serialize([number for number in range(1, 11) if number != 10])

    with pytest.raises(ConfigurationError, match="it did not sign who delivered"):
        round.run(tamper=two_lists)
    # A server that takes those signatures all the same finds no quorum for the second list.
    split = Round(keys, 10)
    collected(split, "delivered")
    short, whole = serialize(list(range(1, 10))), serialize(list(range(1, 11)))
    signed = {
        number: split.members[name].answer("delivered", short if number <= 5 else whole)
        for number, name in enumerate(split.names[:9], 1)
    }
    for name in ("d-000", "d-008"):
        with pytest.raises(ConfigurationError, match="the server may have told others another list"):
            split.members[name].answer("agreements", serialize(signed))


@pytest.mark.parametrize(
    ("delivered", "reason"),
    [
        ([1], "asks for a sum of 1 updates, and 4 are the fewest"),
        ([1, 2, 3], "asks for a sum of 3 updates, and 4 are the fewest"),
        ([2, 3, 4, 5], "says that this device has not delivered"),
        ([1, 2, 3, 3, 4], "others than those of the round"),
        ([1, 2, 3, 4, 6], "others than those of the round"),
        (["1", 2, 3, 4], "a list of clients that is not one of numbers"),
        ({1: b""}, "a list of clients that is not one of numbers"),
    ],
)
def test_a_request_for_a_single_update_or_for_few_is_refused(keys: Keys, delivered: object, reason: str) -> None:
    round = Round(keys, 5)
    collected(round, "delivered")
    with pytest.raises((ConfigurationError, SerializationError), match=reason):
        round.members["d-000"].answer("delivered", serialize(delivered))
    with pytest.raises(ConfigurationError, match="each step is answered once"):
        round.members["d-000"].answer("delivered", serialize([1, 2, 3, 4, 5]))


def test_a_small_roster_is_refused(keys: Keys) -> None:
    round = Round(keys, 2)
    with pytest.raises(CommunicationError, match="only 2 clients have sent keys, and the sum needs 3"):
        round.run()
    with pytest.raises(SerializationError, match="not a list of clients"):
        Round(keys, 2).members["d-000"].answer("roster", serialize([]))
    roster = serialize(sorted(deserialize(round.members[name].keys()) for name in round.names))
    with pytest.raises(ConfigurationError, match="a sum of 2 updates, and 3 are the fewest"):
        round.members["d-000"].answer("roster", roster)


def replaced(place: int, value: object) -> Callable[[list[list[object]]], None]:
    def change(members: list[list[object]]) -> None:
        members[1][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced(2, KeyPair().public), "not signed by it"),
        (replaced(3, KeyPair().public), "not signed by it"),
        (replaced(4, bytes(32)), "not signed by it"),
        (replaced(1, bytes(range(32))), "not signed by it"),
        (replaced(5, bytes(64)), "not signed by it"),
        (replaced(0, "d-000"), "twice in the round"),
        (replaced(2, b"short"), "another size"),
        (lambda members: members.__delitem__(0), "other keys for this device"),
        (lambda members: members[1].__setitem__(slice(1, 4), members[2][1:4]), "the same key"),
    ],
)
def test_a_server_cannot_put_itself_in_the_middle(
    keys: Keys, change: Callable[[list[list[object]]], None], reason: str
) -> None:
    round = Round(keys, 5)
    members = deserialize(collected(round, "roster")["d-000"])
    change(members)
    with pytest.raises((ConfigurationError, SerializationError), match=reason):
        round.members["d-000"].answer("roster", serialize(members))


def test_a_device_that_the_server_made_up_is_not_known(keys: Keys) -> None:
    round = Round(keys, 5)
    made_up = SumMember(
        round.context, round.updates["d-000"], 1, name="d-001", signer=keys["invented"], unknown=lambda shown: []
    )
    members = deserialize(collected(round, "roster")["d-000"])
    members[1] = deserialize(made_up.keys())
    with pytest.raises(ConfigurationError, match="'d-001' is not a device that this one knows, or has another key"):
        round.members["d-000"].answer("roster", serialize(members))


def test_keys_and_shares_of_another_round_do_not_get_in(keys: Keys) -> None:
    """A server that knows the mask key of a client that was lost in the first round shows it in the second."""
    first, second = Round(keys, 5), Round(keys, 5, round=1)
    old = deserialize(first.members["d-001"].keys())
    members = deserialize(collected(second, "roster")["d-000"])
    members[1] = old
    with pytest.raises(ConfigurationError, match="not signed by it"):
        second.members["d-000"].answer("roster", serialize(members))
    # Within one attempt (a server that was started again) the signature fits; then nobody can seal with those keys.
    twice, again = Round(keys, 5), Round(keys, 5)
    stale = deserialize(twice.members["d-001"].keys())
    members = deserialize(collected(again, "roster")["d-000"])
    members[1] = stale
    again.members["d-000"].answer("roster", serialize(members))
    boxes = deserialize(collected(twice, "sealed")["d-000"])
    with pytest.raises(ConfigurationError, match="the shares that came as those of 'd-001' are not"):
        again.members["d-000"].answer("sealed", serialize(boxes))


def test_shares_that_were_changed_on_the_way_are_refused(keys: Keys) -> None:
    round = Round(keys, 5)
    boxes = deserialize(collected(round, "sealed")["d-000"])
    boxes[3] = boxes[3][:-1] + bytes([boxes[3][-1] ^ 1])
    with pytest.raises(ConfigurationError, match="the shares that came as those of 'd-002' are not"):
        round.members["d-000"].answer("sealed", serialize(boxes))
    few = Round(keys, 5)
    boxes = deserialize(collected(few, "sealed")["d-000"])
    with pytest.raises(ConfigurationError, match="only 2 clients have shared their secrets, and 4 are the fewest"):
        few.members["d-000"].answer("sealed", serialize({2: boxes[2]}))


def test_a_client_whose_shares_are_wrong_is_outvoted_and_two_are_noticed(keys: Keys) -> None:
    def lying(names: set[str]) -> Round:
        round = Round(keys, 8)
        for name in names:
            member = round.members[name]
            answer = member.answer

            def changed(step: str, payload: bytes, answer: Callable[[str, bytes], bytes] = answer) -> bytes:
                found = answer(step, payload)
                if step != "agreements":
                    return found
                seeds, lost_keys = deserialize(found)
                return serialize([dict.fromkeys(seeds, bytes(33)), lost_keys])

            member.answer = changed  # type: ignore[method-assign]
        return round

    one = lying({"d-003"})
    assert_is_plain_sum(one, one.run())
    with pytest.raises(CommunicationError, match="cannot be put together"):
        lying({"d-000", "d-003", "d-005"}).run()


def test_keys_for_other_settings_or_of_another_device_are_refused(keys: Keys) -> None:
    round, other = Round(keys, 3), Round(keys, 3, value_bits=12)
    with pytest.raises(ConfigurationError, match="for this round and these settings"):
        round.collector.take_keys("d-000", other.members["d-000"].keys())
    with pytest.raises(ConfigurationError, match="keys of another device"):
        round.collector.take_keys("d-001", round.members["d-000"].keys())
    with pytest.raises(SerializationError):
        round.collector.take_keys("d-001", serialize(["d-001"]))


def test_settings_that_protect_nobody_are_refused() -> None:
    for name, value in (("value_range", 0.0), ("value_bits", 25), ("most_samples", 0), ("fewest", 2), ("corrupt", 0.9)):
        with pytest.raises(ConfigurationError):
            SecureAggregation(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="one client and the server together read every update"):
        SecureAggregation(scheme="homomorphic")
    with pytest.raises(ConfigurationError, match="several servers that do not work together"):
        SecureAggregation(scheme="multiparty")
    with pytest.raises(ConfigurationError, match="no scheme of this name"):
        SecureAggregation(scheme="enclave")
