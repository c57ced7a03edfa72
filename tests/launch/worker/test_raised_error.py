from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torsh_distributed.errors import (
    CommunicationError,
    InvalidArgument,
    NonFiniteLoss,
    OperationTimeout,
    ProcessFailure,
)
from torsh_distributed.launch.worker.raised_error import describe_error, is_about_peers, own_error, points_to


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture(autouse=True)
def as_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


@pytest.mark.parametrize(
    ("error", "peers"),
    [
        (CommunicationError("rank 1 left the group", peer=1, rank=0), {1}),
        (CommunicationError("rank 2 gave up waiting", origin=2, rank=0), {2}),
        (CommunicationError("this rank gave up", origin=0, rank=0), set()),
        (OperationTimeout("late", missing_ranks=[1, 3]), {1, 3}),
        (ProcessFailure("rank 2 could not load: no file", rank=2), {2}),
        (ProcessFailure("the process of rank 1 ended", failed_rank=1, rank=0, sequence=4), {1}),
        (NonFiniteLoss("nan", ranks=[3], rank=0), {3}),
        (RuntimeError("[…/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4"), set()),
        (RuntimeError("[3] is setting up NCCL communicator … TCPStore: timed out"), set()),
    ],
)
def test_an_error_about_peers_is_a_consequence_that_names_them(error: Exception, peers: set[int]) -> None:
    assert points_to(raised(error)) == (True, peers)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        InvalidArgument("a bad argument", peer=1),
        NonFiniteLoss("nan", ranks=[0, 3], rank=0),
        ConnectionError("the data server closed the connection"),
        RuntimeError("the connection to the database was closed"),
    ],
)
def test_an_error_of_ones_own_is_a_cause(error: Exception) -> None:
    assert points_to(raised(error)) == (False, set())


def test_ranks_of_the_world_win_over_those_of_the_group() -> None:
    error = CommunicationError("rank 1 left the group", peer=1)
    error.world_peers = (5,)
    assert points_to(raised(error)) == (True, {5})


def fail_in_a_finally() -> None:
    try:
        raise ValueError("first")
    finally:
        raise CommunicationError("then")


def test_an_error_about_peers_in_a_finally_does_not_hide_the_cause() -> None:
    with pytest.raises(CommunicationError) as caught:
        fail_in_a_finally()
    assert str(own_error(caught.value)) == "first"
    assert points_to(caught.value) == (False, set())


def fail_because_of_a_peer() -> None:
    try:
        raise CommunicationError("first", peer=2)
    except CommunicationError as first:
        raise RuntimeError("training failed") from first


class _Interrupted:
    """As if Ctrl-C came while a class with this attribute is made."""

    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_in_the_making_of_a_class_stays_one() -> None:
    with pytest.raises((KeyboardInterrupt, RuntimeError)) as caught:
        type("Made", (), {"attribute": _Interrupted()})
    assert type(own_error(caught.value)) is KeyboardInterrupt


def test_an_error_raised_while_handling_one_about_peers_is_a_consequence() -> None:
    with pytest.raises(RuntimeError) as caught:
        fail_because_of_a_peer()
    assert points_to(caught.value) == (True, {2})
    assert is_about_peers(caught.value) is False


def test_the_users_line_comes_first_and_library_frames_are_folded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\ndef load(text):\n    return json.loads(text)\nload('{')\n")
    with pytest.raises(json.JSONDecodeError) as caught:
        exec(compile(script.read_text(), str(script), "exec"), {})
    told = describe_error(caught.value, how="uncaught")
    assert told["where"] == f"{script}:3 in load"
    assert told["kind"] == "JSONDecodeError"
    lines = told["traceback"]
    assert f'  File "{script}", line 3, in load' in lines
    assert any(re.fullmatch(r"  … \d frames in Python, to decoder\.py:\d+ in raw_decode", line) for line in lines)
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert "decoder.py" in told["full"]


def test_the_collective_of_torchs_own_backends_is_the_function_that_raised() -> None:
    source = "def all_reduce():\n    raise RuntimeError('gloo: Connection closed by peer')\n"
    names: dict[str, Any] = {}
    exec(compile(source, dist.distributed_c10d.__file__, "exec"), names)
    with pytest.raises(RuntimeError) as caught:
        names["all_reduce"]()
    assert describe_error(caught.value, how="uncaught")["operation"] == "all_reduce"


def test_an_exception_that_cannot_be_shown_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    told = describe_error(raised(Mute()), how="uncaught")
    assert told["kind"] == "Mute"
    assert told["message"] == "its text cannot be shown: KeyError"


def test_a_syntax_error_points_to_its_own_file(tmp_path: Path) -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("a =\n", str(tmp_path / "train.py"), "exec")
    assert describe_error(caught.value, how="uncaught")["where"] == f"{tmp_path / 'train.py'}:1"


def test_exceptions_of_a_group_are_in_the_traceback() -> None:
    group = ExceptionGroup("several", [raised(ValueError("first bad batch")), raised(KeyError("second"))])
    lines = describe_error(raised(group), how="uncaught")["traceback"]
    text = "\n".join(lines)
    assert "sub-exception 1 of 2:" in text
    assert "ValueError: first bad batch" in text
    assert "KeyError: 'second'" in text
