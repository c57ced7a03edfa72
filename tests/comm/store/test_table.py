"""Expiry, on a clock that the test moves."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.store.table import Table

KEYS = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.none() | st.integers(1, 5)),
    st.tuples(st.just("swap_current"), KEYS, st.none() | st.integers(1, 5)),
    st.tuples(st.just("add"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("pass"), st.integers(1, 4)),
)


class ExpiringModel:
    """For each key its number and its end; looked through in full at every tick."""

    def __init__(self) -> None:
        self.now = 0
        self.data: dict[str, tuple[int, int | None]] = {}

    def step(self, name: str, *args: Any) -> None:
        match name, args:
            case "set", (key, ttl):
                self.data[key] = (0, None if ttl is None else self.now + ttl)
            case "swap_current", (key, ttl):
                self.data[key] = (1, None if ttl is None else self.now + ttl)
            case "add", (key,):
                number, end = self.data.get(key, (0, None))
                self.data[key] = (number + 1, end)
            case "delete", (key,):
                self.data.pop(key, None)
            case "pass", (ticks,):
                self.now += ticks
        self.data = {key: (number, end) for key, (number, end) in self.data.items() if end is None or end > self.now}


def apply(table: Table, name: str, *args: Any) -> None:
    match name, args:
        case "set", (key, ttl):
            table.set(key, b"0", ttl)
        case "swap_current", (key, ttl):
            assert table.compare_and_swap(key, table.get(key), b"1", ttl)
        case "add", (key,):
            table.add(key, 1)
        case "delete", (key,):
            table.delete(key)


@given(program=st.lists(STEPS, max_size=40))
def test_a_key_lives_exactly_its_time(program: list[tuple[Any, ...]]) -> None:
    model = ExpiringModel()
    table = Table(clock=lambda: model.now)
    for step in program:
        apply(table, *step)
        model.step(*step)
        assert {key: int(entry.value) for key, entry in table.items()} == {key: n for key, (n, _) in model.data.items()}
        assert table.missing(["a", "b", "c"]) == [key for key in "abc" if key not in model.data]


def test_expired_values_are_freed_by_the_next_write() -> None:
    now = 0.0
    table = Table(clock=lambda: now)
    for index in range(100):
        table.set(f"lease/{index}", b"x" * 1000, ttl_s=1.0)
    now = 2.0
    table.set("other", b"1", None)
    assert list(table._entries) == ["other"]
    assert table._expiries == []
