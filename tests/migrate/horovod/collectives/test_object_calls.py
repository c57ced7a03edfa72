from __future__ import annotations

import pytest
import torch

from torsh_distributed.errors import SerializationError
from torsh_distributed.migrate.horovod.collectives.object_calls import packed, unpacked

RAN: list[str] = []


def spring(word: str) -> None:
    RAN.append(word)


class Trap:
    """Unpickled, it runs."""

    def __reduce__(self) -> tuple[object, ...]:
        return spring, ("run",)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORSH_SECRET_FILE", raising=False)
    monkeypatch.setenv("TORSH_JOB_TOKEN", "the secret of this job")


@pytest.mark.usefixtures("secret")
def test_what_a_member_packed_is_unpacked() -> None:
    value = {"a": [1, None, "x"]}
    assert unpacked(packed(value)) == value


@pytest.mark.usefixtures("secret")
def test_what_nobody_of_the_job_signed_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    RAN.clear()
    changed = packed(Trap())
    changed[0] ^= 1
    monkeypatch.setenv("TORSH_JOB_TOKEN", "another secret")
    foreign = packed(Trap())
    monkeypatch.delenv("TORSH_JOB_TOKEN")
    unsigned = packed(Trap())
    monkeypatch.setenv("TORSH_JOB_TOKEN", "the secret of this job")
    for message in (changed, foreign, unsigned, torch.empty(0, dtype=torch.uint8)):
        with pytest.raises(SerializationError, match="not signed with the job's secret"):
            unpacked(message)
    assert RAN == []
    unpacked(packed(Trap()))
    assert RAN == ["run"], "the trap works"


def test_a_job_without_a_secret_sends_plain_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORSH_SECRET_FILE", "TORSH_JOB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert unpacked(packed([1, 2])) == [1, 2]
