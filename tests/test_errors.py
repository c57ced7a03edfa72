"""The error tree: readable, picklable and complete, with advice on every class."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from torsh_distributed import errors
from torsh_distributed.errors import (
    BackendError,
    CommunicationError,
    ConfigurationError,
    IoError,
    MemoryAllocationFailed,
    OperationTimeout,
    TorshError,
    error_codes,
    translate_errors,
)

BUILT_INS = {
    "CommunicationError": ConnectionError,
    "OperationTimeout": TimeoutError,
    "IoError": OSError,
    "InvalidArgument": ValueError,
    "ConfigurationError": ValueError,
    "FeatureNotAvailable": RuntimeError,
    "ProcessGroupNotFound": LookupError,
    "JobNotFound": LookupError,
    "MemoryAllocationFailed": MemoryError,
    "BackendNotInitialized": RuntimeError,
}
RETRYABLE = {
    "CommunicationError",
    "OperationTimeout",
    "ProcessFailure",
    "IoError",
    "CheckpointError",
    "BackendError",
}


def test_the_text_is_the_rule_the_facts_and_the_hint() -> None:
    error = ConfigurationError(
        "bucket.first_size_mb must be at most bucket.size_mb",
        hint="leave first_size_mb at its default",
        first_size_mb=32.0,
        size_mb=25.0,
    )
    assert str(error) == (
        "bucket.first_size_mb must be at most bucket.size_mb\n"
        "  got:  first_size_mb=32.0, size_mb=25.0\n"
        "  hint: leave first_size_mb at its default"
    )


@pytest.mark.parametrize("kind", error_codes().values())
def test_every_kind_has_advice_and_survives_pickling(kind: type[TorshError]) -> None:
    error = kind("broken", hint="fix it", operation="all_reduce", rank=3, expected=(2, 2))
    error.__cause__ = KeyError("inner")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert (copy.operation, copy.rank, copy.context["expected"]) == ("all_reduce", 3, (2, 2))
    assert isinstance(copy.__cause__, KeyError)
    assert copy.hints[0] == "fix it"
    assert len(kind.advice) >= 4


@pytest.mark.parametrize(("code", "built_in"), BUILT_INS.items())
def test_leaves_are_also_the_built_in_a_user_would_catch(code: str, built_in: type[Exception]) -> None:
    assert issubclass(error_codes()[code], built_in)


def test_retrying_is_decided_by_type() -> None:
    own = {code: kind for code, kind in error_codes().items() if kind.__module__ == errors.__name__}
    assert {code for code, kind in own.items() if kind.retryable} == RETRYABLE


def test_the_tree_at_the_top_of_the_file_names_every_class() -> None:
    assert errors.__doc__ is not None
    for code, kind in error_codes().items():
        assert code in errors.__doc__ or kind.__module__ != errors.__name__


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (dist.DistStoreError("wait timeout"), OperationTimeout),
        (dist.DistNetworkError("reset"), CommunicationError),
        (dist.DistBackendError("nccl"), BackendError),
        (TimeoutError("late"), OperationTimeout),
        (torch.OutOfMemoryError("cuda"), MemoryAllocationFailed),
        (ConnectionResetError("gone"), CommunicationError),
        (FileNotFoundError(2, "no such file"), IoError),
    ],
)
def test_foreign_errors_become_ours_with_their_cause(raised: Exception, expected: type[TorshError]) -> None:
    with pytest.raises(expected) as caught, translate_errors("barrier", rank=1):
        raise raised
    assert type(caught.value) is expected
    assert caught.value.__cause__ is raised
    assert (caught.value.operation, caught.value.rank) == ("barrier", 1)


def test_our_own_errors_and_programming_errors_pass_unchanged() -> None:
    ours = IoError("disk")
    with pytest.raises(IoError) as caught, translate_errors("save"):
        raise ours
    assert caught.value is ours
    with pytest.raises(ZeroDivisionError), translate_errors("save"):
        1 / 0  # noqa: B018


def test_a_record_is_plain_json_values() -> None:
    record = IoError("disk", path="/x", sizes=[1, 2]).to_dict()
    assert record["code"] == "IoError"
    assert record["context"] == {"path": "/x", "sizes": "[1, 2]"}
