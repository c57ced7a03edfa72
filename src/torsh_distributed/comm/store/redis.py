"""The store in a Redis server: every operation is one command or one script there, so it is atomic for all clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from torsh_distributed.comm.store.keyspace import (
    MAX_VALUE_BYTES,
    Keyspace,
    Swap,
    counter_overflow,
    not_a_counter,
    value_too_large,
)
from torsh_distributed.errors import BackendError, CommunicationError, FeatureNotAvailable, OperationTimeout

# Separates our keys in a database that others may use too.
_NAMESPACE = "torsh/"
_SCAN_COUNT = 1000
# Writers publish the key, so a waiter wakes at once; a message lost with its connection delays it by this much.
_RECHECK_S = 1.0

# KEYS[1]; ARGV: "1" if a value is expected, that value, the desired value, milliseconds to live or "".
_COMPARE_AND_SWAP = """
local current = redis.call('GET', KEYS[1])
local matches
if ARGV[1] == '1' then matches = current == ARGV[2] else matches = current == false end
if not matches then return {0, current} end
if ARGV[4] == '' then redis.call('SET', KEYS[1], ARGV[3])
else redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4]) end
redis.call('PUBLISH', KEYS[1], '')
return {1, ARGV[3]}
"""

# KEYS[1]; ARGV: the suffix, the most bytes a value may have. Returns the length, negative if refused.
_APPEND = """
local length = redis.call('STRLEN', KEYS[1]) + #ARGV[1]
if length > tonumber(ARGV[2]) then return -length end
redis.call('APPEND', KEYS[1], ARGV[1])
redis.call('PUBLISH', KEYS[1], '')
return length
"""


class RedisKeyspace(Keyspace):
    """Keys under `torsh/` in one database of a Redis server, whose clock decides when they expire."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._redis_module = redis = _import_redis()
        self.url = _without_password(url)
        self._timeout_s = timeout_s
        # The client must not repeat commands by itself: INCRBY sent twice counts twice.
        no_retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
        self._redis = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=no_retry, retry_on_timeout=False
        )
        self._swap = self._redis.register_script(_COMPARE_AND_SWAP)
        self._append = self._redis.register_script(_APPEND)
        try:
            with self._reported("connect"):
                self._redis.ping()
        except CommunicationError:
            self.close()
            raise

    @override
    def set(self, key: str, value: bytes, ttl_s: float | None) -> None:
        with self._reported("set"), self._redis.pipeline(transaction=True) as steps:
            steps.set(_NAMESPACE + key, value, px=_milliseconds(ttl_s))
            steps.publish(_NAMESPACE + key, b"")
            steps.execute()

    @override
    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._reported("get"):
            values: list[bytes | None] = self._redis.mget([_NAMESPACE + key for key in keys])
            return values

    @override
    def delete(self, key: str) -> bool:
        with self._reported("delete"):
            return bool(self._redis.delete(_NAMESPACE + key))

    @override
    def compare_and_swap(self, key: str, expected: bytes | None, desired: bytes, ttl_s: float | None) -> Swap:
        has_expected = int(expected is not None)
        with self._reported("compare_and_swap"):
            swapped, *value = self._swap(
                keys=[_NAMESPACE + key], args=[has_expected, expected or b"", desired, _milliseconds(ttl_s) or b""]
            )
        return Swap(bool(swapped), value[0] if value else None)

    @override
    def add(self, key: str, delta: int) -> int:
        with self._reported("add"), self._redis.pipeline(transaction=True) as steps:
            steps.incrby(_NAMESPACE + key, delta)
            steps.publish(_NAMESPACE + key, b"")
            total, _ = steps.execute(raise_on_error=False)
            if isinstance(total, Exception):
                raise _add_error(key, delta, total) from total
            return int(total)

    @override
    def append(self, key: str, suffix: bytes) -> None:
        with self._reported("append"):
            num_bytes = int(self._append(keys=[_NAMESPACE + key], args=[suffix, MAX_VALUE_BYTES]))
        if num_bytes < 0:
            raise value_too_large(key, -num_bytes)

    @override
    def wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        with self._reported("wait"):
            missing = self._missing(keys)
            if not missing or timeout_s <= 0:
                return missing
            with self._redis.pubsub() as messages:
                messages.subscribe(*[_NAMESPACE + key for key in missing])
                num_unconfirmed = len(set(missing))
                while num_unconfirmed or (missing := self._missing(missing)):
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0:
                        break
                    message = messages.get_message(timeout=min(remaining_s, _RECHECK_S))
                    # Checking before every subscription is confirmed could miss a write in between.
                    if message is None or message["type"] == "subscribe":
                        num_unconfirmed = max(0, num_unconfirmed - 1)
            return missing

    @override
    def count(self, prefix: str) -> int:
        pattern = _escape_pattern(_NAMESPACE + prefix) + "*"
        with self._reported("num_keys"):
            # A scan may name a key twice.
            return len(set(self._redis.scan_iter(match=pattern, count=_SCAN_COUNT)))

    @override
    def close(self) -> None:
        self._redis.close()

    def _missing(self, keys: Sequence[str]) -> list[str]:
        with self._redis.pipeline(transaction=False) as steps:
            for key in keys:
                steps.exists(_NAMESPACE + key)
            found = steps.execute()
        return [key for key, exists in zip(keys, found, strict=True) if not exists]

    @contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        redis = self._redis_module
        try:
            yield
        except redis.TimeoutError as error:
            raise OperationTimeout(
                "the Redis server did not answer in time",
                hint="check that it runs and is not busy with a slow command; or raise the timeout for large values",
                operation=operation,
                store=self.url,
                timeout_s=self._timeout_s,
            ) from error
        except redis.ConnectionError as error:
            raise CommunicationError(
                "the Redis server cannot be reached, or the connection to it was lost",
                hint="start redis-server, or correct host, port and password in the URL",
                operation=operation,
                store=self.url,
                reason=str(error),
            ) from error
        except redis.RedisError as error:
            raise BackendError(
                "the Redis server refused a command",
                hint="its answer is under `got:`; it may be full, read-only or need a password",
                operation=operation,
                store=self.url,
                reason=str(error),
            ) from error


def _import_redis() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.retry
    except ImportError as error:
        raise FeatureNotAvailable(
            "a redis:// store needs the Redis client, which is not installed",
            hint='pip install "torsh-distributed[redis]"',
            package="redis",
        ) from error
    return redis


def _add_error(key: str, delta: int, error: Exception) -> Exception:
    """Redis distinguishes the two mistakes a caller can make by text only; other errors stay as they are."""
    if "not an integer" in str(error):
        return not_a_counter(key)
    return counter_overflow(key, delta) if "would overflow" in str(error) else error


def _milliseconds(ttl_s: float | None) -> int | None:
    return None if ttl_s is None else max(1, round(ttl_s * 1000))


def _escape_pattern(text: str) -> str:
    return "".join(f"\\{char}" if char in "*?[]\\^-" else char for char in text)


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{host}{port}{parts.path}"
