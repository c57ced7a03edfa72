"""The same random program gives the same answers on every store, and on a plain dict."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torsh_distributed.comm.store import Store, StoreTimeout
from torsh_distributed.errors import InvalidArgument

KEYS = st.sampled_from(["a", "b", "a/b", "a/", "ü*?[a-z]\\", " "])
VALUES = st.one_of(
    st.sampled_from([b"", b"0", b"7", b"-3", b"-0", b" 5", b"07", b"9223372036854775807", b"\x00\xff", b"text"]),
    st.binary(max_size=12),
)
DELTAS = st.one_of(st.integers(-3, 3), st.sampled_from([2**63 - 1, -(2**63), 2**62]))
# Long enough that nothing expires while the program runs: here it must make no difference.
TTLS = st.sampled_from([None, 3600.0])

Step = tuple[Any, ...]
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, VALUES, TTLS),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("contains"), KEYS),
    st.tuples(st.just("swap"), KEYS, st.none() | VALUES, VALUES, TTLS),
    st.tuples(st.just("swap_current"), KEYS, VALUES),
    st.tuples(st.just("add"), KEYS, DELTAS),
    st.tuples(st.just("append"), KEYS, VALUES),
    st.tuples(st.just("missing"), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("num_keys"), st.sampled_from(["", "a", "ü*?[a-z]\\"])),
)
_runs = itertools.count()


class Model:
    """What a store is, in terms of a dict; TTLs of an hour make no difference."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def do(self, name: str, *args: Any) -> Any:
        return getattr(self, name)(*args)

    def set(self, key: str, value: bytes, _ttl_s: float | None) -> None:
        self.data[key] = value

    def get(self, key: str) -> bytes | None:
        return self.data.get(key)

    def delete(self, key: str) -> bool:
        return self.data.pop(key, None) is not None

    def contains(self, key: str) -> bool:
        return key in self.data

    def swap(self, key: str, expected: bytes | None, desired: bytes, _ttl_s: float | None) -> tuple[bool, bytes | None]:
        if self.data.get(key) == expected:
            self.data[key] = desired
            return True, desired
        return False, self.data.get(key)

    def swap_current(self, key: str, desired: bytes) -> tuple[bool, bytes | None]:
        return self.swap(key, self.data.get(key), desired, None)

    def add(self, key: str, delta: int) -> int | str:
        text = self.data.get(key, b"0").decode(errors="replace")
        try:
            total = int(text) + delta
        except ValueError:
            return "refused"
        if str(int(text)) != text or not -(2**63) <= int(text) < 2**63 or not -(2**63) <= total < 2**63:
            return "refused"
        self.data[key] = str(total).encode()
        return total

    def append(self, key: str, suffix: bytes) -> None:
        self.data[key] = self.data.get(key, b"") + suffix

    def missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if key not in self.data]

    def num_keys(self, prefix: str) -> int:
        return sum(not prefix or key.startswith(prefix + "/") for key in self.data)


class Subject:
    """The same operations on a real store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def do(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self, name)(*args)
        except InvalidArgument:
            return "refused"

    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        self.store.set(key, value, ttl_s=ttl_s)

    def get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key, timeout_s=0)
        except StoreTimeout:
            return None

    def delete(self, key: str) -> bool:
        return self.store.delete(key)

    def contains(self, key: str) -> bool:
        return self.store.contains(key)

    def swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> tuple[bool, bytes | None]:
        swap = self.store.compare_and_swap(key, expected, desired, ttl_s=ttl_s)
        return swap.swapped, swap.value

    def swap_current(self, key: str, desired: bytes) -> tuple[bool, bytes | None]:
        return self.swap(key, self.get(key), desired, None)

    def add(self, key: str, delta: int) -> int:
        return self.store.add(key, delta)

    def append(self, key: str, suffix: bytes) -> None:
        self.store.append(key, suffix)

    def missing(self, keys: list[str]) -> list[str]:
        try:
            self.store.wait(keys, 0)
        except StoreTimeout as error:
            return list(error.context["missing_keys"])
        return []

    def num_keys(self, prefix: str) -> int:
        return (self.store.prefix(prefix) if prefix else self.store).num_keys()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=st.lists(STEPS, max_size=25))
def test_a_random_program_has_the_answers_of_a_dict(store: Store, program: list[Step]) -> None:
    with store.prefix(f"run-{next(_runs)}") as fresh:
        model, subject = Model(), Subject(fresh)
        assert [subject.do(*step) for step in program] == [model.do(*step) for step in program]
        assert fresh.num_keys() == len(model.data)
        for key, value in model.data.items():
            assert fresh.get(key, timeout_s=0) == value
