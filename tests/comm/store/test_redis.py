"""What only the Redis store can get wrong."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bed.ports import free_port
from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import BackendError, CommunicationError, FeatureNotAvailable


@pytest.mark.needs_redis
def test_an_absent_server_is_reported_at_once_and_without_the_password() -> None:
    began = time.monotonic()
    with pytest.raises(CommunicationError, match="cannot be reached") as caught:
        open_store(f"redis://:geheim@127.0.0.1:{free_port()}/0", timeout_s=5)
    assert time.monotonic() - began < 5
    assert "geheim" not in str(caught.value)
    assert "start redis-server" in str(caught.value)


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(FeatureNotAvailable, match=r'pip install "torsh-distributed\[redis\]"'):
        open_store("redis://127.0.0.1:6379/0")


@pytest.mark.needs_redis
def test_other_peoples_keys_are_neither_seen_nor_counted(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as other, open_store(redis_url) as store:
        other.set("key", "theirs")
        assert not store.contains("key")
        assert store.num_keys() == 0


@pytest.mark.needs_redis
def test_a_key_of_another_type_is_reported(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as other, open_store(redis_url) as store:
        other.lpush("torsh/key", "a list")
        with pytest.raises(BackendError, match="WRONGTYPE"):
            store.add("key", 1)


@pytest.mark.needs_redis
def test_a_lost_connection_is_replaced_at_the_next_call(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as other, open_store(redis_url) as store:
        store.set("key", "1")
        other.client_kill_filter(_type="normal", skipme=True)
        assert store.get("key") == b"1"


@pytest.mark.needs_redis
def test_a_write_that_wakes_nobody_is_noticed_by_looking_again(redis_url: str) -> None:
    import redis

    with redis.Redis.from_url(redis_url) as other, open_store(redis_url) as store, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["key"], 20)
        while not other.pubsub_numsub("torsh/key")[0][1]:
            time.sleep(0.01)
        other.set("torsh/key", "written past the store, without a message")
        assert waiting.result(timeout=20) is None
