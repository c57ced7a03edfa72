"""Calls between two workers: results, errors, limits, streams, deferred replies and cancellation."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.rpc import exposed_functions as there
from tests.rpc.conftest import MakeWorker
from torsh_distributed import rpc
from torsh_distributed.errors import (
    BackendNotInitialized,
    CommunicationError,
    InvalidArgument,
    OperationTimeout,
    RemoteError,
    SerializationError,
)
from torsh_distributed.rpc import RpcWorker

MB = 1 << 20


@pytest.mark.parametrize("function", [there.echo, there.echo_on_a_thread])
@pytest.mark.parametrize(
    "value",
    [
        7,
        2**70,
        (1, [2.5, None], {"a": {1, 2}, (1, 2): b"x"}),
        "text" * 100_000,
        [b"y" * (3 * MB), 2**80, "z" * MB],
        complex(1, -2),
    ],
)
def test_plain_values_come_back_as_they_were(caller: RpcWorker, function: Any, value: Any) -> None:
    back = caller.call("callee", function, (value,))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("numel", [0, 5, 100_003, 3 * MB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_come_back_as_they_were(caller: RpcWorker, numel: int, dtype: torch.dtype) -> None:
    sent = [torch.arange(numel).remainder(7).to(dtype), torch.ones((), dtype=dtype), torch.ones(0, 3, dtype=dtype)]
    back = caller.call("callee", there.echo_on_a_thread, (sent,))
    for one, other in zip(back, sent, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    back[0].zero_()  # memory of its own
    assert numel < 2 or bool(sent[0].any())


def test_a_view_of_a_tensor_that_is_not_in_one_piece_arrives(caller: RpcWorker) -> None:
    sent = torch.arange(12.0).view(3, 4).t()[1:]
    torch.testing.assert_close(caller.call("callee", there.echo, (sent,)), sent)


def test_what_is_written_after_call_async_does_not_show(caller: RpcWorker) -> None:
    there.gates["x"] = threading.Event()
    sent = torch.ones(2 * MB)
    small = torch.ones(10)
    future = caller.call_async("callee", there.add, (sent, small[:1]))
    sent.zero_()
    small.zero_()
    assert bool((future.result() == 2).all())


def test_dataclasses_and_exposed_functions_travel_by_name(caller: RpcWorker) -> None:
    point = caller.call("callee", there.echo, (there.Point(3, torch.arange(4)),))
    assert isinstance(point, there.Point)
    assert (point.x, point.values.tolist()) == (3, [0, 1, 2, 3])
    assert caller.call("callee", there.echo, (there.add,)) is there.add


def test_what_cannot_travel_is_named_with_its_place_and_the_worker_goes_on(caller: RpcWorker) -> None:
    with pytest.raises(SerializationError, match=r"args\[1\]\['k'\]\[0\] cannot be sent: it is a object"):
        caller.call("callee", there.add, (1, {"k": [object()]}))
    with pytest.raises(SerializationError, match=r"the result\['inner'\]\[0\] cannot be sent"):
        caller.call("callee", there.what_cannot_travel)
    with pytest.raises(SerializationError, match="it is a function"):
        caller.call("callee", there.echo, (there.not_exposed,))
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    with pytest.raises(SerializationError, match="contains itself"):
        caller.call("callee", there.echo, (cyclic,))
    with pytest.raises(SerializationError, match="more than a megabyte"):
        caller.call("callee", there.echo, (list(range(2**20)),))
    assert caller.call("callee", there.add, (1, 2)) == 3


def test_errors_have_their_type_and_the_traceback_of_the_callee(caller: RpcWorker) -> None:
    with pytest.raises(ValueError, match="a value error") as caught:
        caller.call("callee", there.fail, ("value",))
    error = caught.value
    assert isinstance(error, RemoteError)
    assert error.type_name == "ValueError"
    assert "in fail\n" in error.traceback
    assert error.context["worker"] == "callee"
    with pytest.raises(KeyError):
        caller.call("callee", there.fail, ("key",))
    with pytest.raises(RemoteError, match="OwnError: a own error"):
        caller.call("callee", there.fail, ("own",))


def test_inline_functions_fail_and_reply_later_as_others_do(caller: RpcWorker) -> None:
    with pytest.raises(ValueError, match="inline"):
        caller.call("callee", there.misbehave_inline, ("raise",))
    for how in ("list", "object"):
        with pytest.raises(SerializationError, match=r"the result.* cannot be sent: it is a object"):
            caller.call("callee", there.misbehave_inline, (how,))
    future = caller.call_async("callee", there.misbehave_inline, ("later",))
    assert caller.call("callee", there.echo, (1,)) == 1
    there.later[0].set_result(5)
    assert future.result() == 5
    with pytest.raises(TypeError):
        caller.call("callee", there.echo, (1, 2, 3))
    assert caller.call("callee", there.echo, (), {"value": 7}) == 7


def test_only_what_is_exposed_can_be_called(caller: RpcWorker) -> None:
    with pytest.raises(InvalidArgument, match="no function of this name"):
        caller.call("callee", there.not_exposed)
    for name in ("os:system", "builtins:eval", "tests.rpc.exposed_functions:Counter._secret", "@_begin", ""):
        with pytest.raises(InvalidArgument, match="no function of this name"):
            caller.call("callee", name, ("true",))
    with pytest.raises(InvalidArgument, match=r"did you mean tests.rpc.exposed_functions:add\?"):
        caller.call("callee", "tests.rpc.exposed_functions:ad", ())
    assert there.seen == []


def test_a_worker_that_is_not_there_is_said_with_those_that_are(caller: RpcWorker) -> None:
    with pytest.raises(InvalidArgument, match="callee, caller"):
        caller.call("nobody", there.add, (1, 2))


def test_a_name_is_taken_once(caller: RpcWorker, make_worker: MakeWorker) -> None:
    with pytest.raises(InvalidArgument, match="takes calls already"):
        make_worker("callee")
    assert caller.call("callee", there.add, (1, 2)) == 3


def test_a_call_that_takes_too_long_raises_and_the_callee_learns_of_it(caller: RpcWorker) -> None:
    there.gates.update(begun=threading.Event(), cancelled=threading.Event())
    with pytest.raises(OperationTimeout, match="did not end in time"):
        caller.call("callee", there.wait_until_cancelled, timeout_s=0.2)
    assert there.gates["cancelled"].wait(20)


def test_the_deadline_travels_also_with_calls_further_on(make_worker: MakeWorker, caller: RpcWorker) -> None:
    assert 0 < caller.call("callee", there.remaining_s, timeout_s=20) <= 20
    assert 20 < caller.call("callee", there.remaining_s) <= 60


def test_a_call_whose_time_is_over_is_not_begun(make_worker: MakeWorker) -> None:
    make_worker("busy", num_threads=1)
    caller = make_worker("caller")
    there.gates["x"] = threading.Event()
    first = caller.call_async("busy", there.wait_for_gate, ("x",))
    with pytest.raises(OperationTimeout):
        caller.call("busy", there.keep, (1,), timeout_s=0.1)
    caller.ping("busy")  # on the same lane, so the callee has read that the call was given up
    there.gates["x"].set()
    assert first.result() == "x"
    assert caller.call("busy", there.add, (1, 1)) == 2
    assert there.kept == []


def test_a_future_can_be_cancelled_and_the_callee_learns_of_it(caller: RpcWorker) -> None:
    there.gates.update(begun=threading.Event(), cancelled=threading.Event())
    future = caller.call_async("callee", there.wait_until_cancelled)
    assert there.gates["begun"].wait(20)
    assert not future.done()
    assert future.cancel()
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result()
    assert there.gates["cancelled"].wait(20)
    assert caller.connections().num_active == 0


def test_futures_can_be_awaited_together(caller: RpcWorker) -> None:
    async def gather() -> list[Any]:
        return await asyncio.gather(*(caller.call_async("callee", there.add, (i, 1)) for i in range(20)))

    assert asyncio.run(gather()) == list(range(1, 21))


def test_a_callback_runs_although_nobody_waits(caller: RpcWorker) -> None:
    done = threading.Event()
    results: list[Any] = []
    future = caller.call_async("callee", there.add, (1, 2))
    future.add_done_callback(lambda ended: (results.append(ended.result()), done.set()))  # type: ignore[func-returns-value]
    assert done.wait(20)
    assert results == [3]


def test_an_observed_future_fails_at_its_deadline(caller: RpcWorker) -> None:
    there.gates["x"] = threading.Event()
    done = threading.Event()
    future = caller.call_async("callee", there.wait_for_gate, ("x",), timeout_s=0.1)
    future.add_done_callback(lambda _: done.set())
    assert done.wait(20)
    assert isinstance(future.exception(), OperationTimeout)


def test_many_threads_share_a_link(caller: RpcWorker) -> None:
    def call_often(base: int) -> list[int]:
        function = there.echo if base % 2 else there.echo_on_a_thread
        return [caller.call("callee", function, (base * 1000 + i,)) for i in range(100)]

    with ThreadPoolExecutor(8) as threads:
        results = [future.result(60) for future in [threads.submit(call_often, base) for base in range(8)]]
    assert results == [[base * 1000 + i for i in range(100)] for base in range(8)]
    assert caller.connections().num_connections == 1


def test_calls_beside_an_observed_one_are_answered_at_once(caller: RpcWorker) -> None:
    """The loop, which reads while nobody waits, must not take the reply that a thread has begun to wait for."""
    there.gates["x"] = threading.Event()
    observed = caller.call_async("callee", there.wait_for_gate, ("x",))
    observed.add_done_callback(lambda _: None)
    for number in range(3000):
        future = caller.call_async("callee", there.echo, (number,), timeout_s=100.0)
        sum(range(number % 3000))  # so that waiting begins before, while and after the reply arrives
        assert future.result() == number
    there.gates["x"].set()
    assert observed.result() == "x"


def test_thousands_of_calls_under_way_that_nobody_reads_for_are_all_answered(caller: RpcWorker) -> None:
    futures = [caller.call_async("callee", there.echo, (i,)) for i in range(3000)]
    assert [future.result() for future in futures] == list(range(3000))


def test_a_ping_does_not_wait_for_functions_that_run(make_worker: MakeWorker) -> None:
    make_worker("busy", num_threads=1)
    caller = make_worker("caller")
    there.gates["x"] = threading.Event()
    first = caller.call_async("busy", there.wait_for_gate, ("x",))
    assert caller.ping("busy") < 20
    there.gates["x"].set()
    assert first.result() == "x"


def test_call_all_has_a_result_or_an_error_for_every_name(make_worker: MakeWorker, caller: RpcWorker) -> None:
    make_worker("third")
    results = caller.call_all(["callee", "third", "nobody"], there.add, (1, 2))
    assert results["callee"] == results["third"] == 3
    assert isinstance(results["nobody"], InvalidArgument)
    failed = caller.call_all(["callee"], there.fail, ("value",))
    assert isinstance(failed["callee"], ValueError)


def test_a_limited_function_runs_as_often_at_once_as_it_may(caller: RpcWorker) -> None:
    for name in "abcd":
        there.gates[name] = threading.Event()
    futures = [caller.call_async("callee", there.wait_limited, (name,)) for name in "abcd"]
    # Threads are free for another function meanwhile, so it is the function's own limit that holds.
    assert caller.call("callee", there.slow, (0.1,)) == 0.1
    assert there.seen == ["a", "b"]
    there.gates["a"].set()
    assert futures[0].result() == "a"
    assert "d" not in there.seen
    for name in "bcd":
        there.gates[name].set()
    assert [future.result() for future in futures[1:]] == ["b", "c", "d"]
    assert sorted(there.seen) == ["a", "b", "c", "d"]


def test_a_stream_comes_item_by_item_and_no_further_than_it_is_read(caller: RpcWorker) -> None:
    items = caller.stream("callee", there.count_to, (1000,))
    assert [next(items) for _ in range(20)] == list(range(20))
    assert caller.call("callee", there.add, (1, 2)) == 3
    assert len(there.seen) < 100
    items.close()
    assert list(caller.stream("callee", there.count_to, (100,))) == list(range(100))


def test_a_stream_that_is_closed_ends_at_its_next_yield(caller: RpcWorker) -> None:
    with caller.stream("callee", there.count_to, (10**9,)) as items:
        assert next(items) == 0
    deadline_s = time.monotonic() + 20
    while "closed" not in there.seen and time.monotonic() < deadline_s:
        caller.call("callee", there.add, (1, 2))
    assert there.seen[-1] == "closed"


def test_an_error_in_a_stream_comes_behind_its_items(caller: RpcWorker) -> None:
    items = caller.stream("callee", there.fail_after, (3,))
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more"):
        next(items)


def test_stream_and_call_are_not_mixed_up(caller: RpcWorker) -> None:
    with pytest.raises(InvalidArgument, match=r"call it with rpc\.stream"):
        caller.call("callee", there.count_to, (3,))
    with pytest.raises(InvalidArgument, match=r"call it with rpc\.call"):
        list(caller.stream("callee", there.add, (1, 2)))


def test_a_reply_can_come_later_without_a_thread_that_waits(make_worker: MakeWorker) -> None:
    make_worker("callee", num_threads=1)
    caller = make_worker("caller")
    futures = [caller.call_async("callee", there.answer_later) for _ in range(5)]
    assert caller.call("callee", there.add, (1, 2)) == 3
    assert len(there.later) == 5
    for number, later in enumerate(there.later[:4]):
        later.set_result(number)
    there.later[4].set_exception(ValueError("never"))
    assert [future.result() for future in futures[:4]] == [0, 1, 2, 3]
    assert isinstance(futures[4].exception(), ValueError)


def test_a_result_that_is_too_large_is_an_error_and_nothing_more(make_worker: MakeWorker) -> None:
    make_worker("callee", most_payload_bytes=MB)
    caller = make_worker("caller", most_payload_bytes=MB)
    with pytest.raises(SerializationError, match="more bytes than are allowed"):
        caller.call("callee", there.ones, (2 * MB,))
    with pytest.raises(SerializationError, match="more bytes than are allowed"):
        caller.call("callee", there.echo, (torch.ones(MB),))
    assert caller.call("callee", there.ones, (MB // 2,)).sum() == MB // 2


def test_a_worker_that_leaves_fails_what_is_under_way_and_another_of_its_name_takes_over(
    make_worker: MakeWorker,
) -> None:
    first = make_worker("callee")
    caller = make_worker("caller")
    there.gates["x"] = threading.Event()
    future = caller.call_async("callee", there.wait_for_gate, ("x",))
    closing = threading.Thread(target=first.close)
    closing.start()
    with pytest.raises(CommunicationError, match="callee"):
        future.result()
    there.gates["x"].set()
    closing.join(20)
    with pytest.raises(InvalidArgument, match="no worker named"):
        caller.call("callee", there.add, (1, 2))
    make_worker("callee")
    assert caller.call("callee", there.add, (1, 2)) == 3


def test_workers_are_known_by_name_number_and_place(caller: RpcWorker) -> None:
    info = caller.find("callee")
    assert caller.call(info, there.add, (1, 2)) == caller.call(info.id, there.add, (1, 2)) == 3
    assert [one.name for one in caller.workers()] == ["callee", "caller"]
    with pytest.raises(OperationTimeout, match="late"):
        caller.wait_for(["late"], timeout_s=0.05)


def test_before_start_every_function_says_what_to_do() -> None:
    with pytest.raises(BackendNotInitialized, match=r"rpc\.start"):
        rpc.call("a", "b")
    assert not rpc.is_started()


@pytest.mark.parametrize("name", ["call", "call_async", "call_all", "stream", "ping"])
def test_the_functions_of_the_module_have_the_signatures_of_the_methods(name: str) -> None:
    own, method = (inspect.signature(getattr(home, name)) for home in (rpc, RpcWorker))
    assert list(own.parameters.values()) == list(method.parameters.values())[1:]
    assert own.return_annotation == method.return_annotation


def test_the_functions_of_the_module_use_the_worker_of_the_process(make_worker: MakeWorker) -> None:
    make_worker("callee")
    other = make_worker("other")
    rpc.start("me", store=other.directory._store.underlying_store)
    try:
        assert rpc.call("callee", there.add, (1, 2)) == 3
        assert 0 < rpc.call("callee", there.remaining_s_of_a_call_further_on, ("other",), timeout_s=30) <= 30
        assert rpc.worker_info().name == "me"
        with pytest.raises(InvalidArgument, match="already"):
            rpc.start("again", store=other.directory._store.underlying_store)
    finally:
        rpc.shutdown()
    assert not rpc.is_started()


def test_a_result_goes_with_the_last_reference_to_its_future(caller: RpcWorker) -> None:
    gc.collect()
    gc.disable()
    try:
        for is_observed in (False, True):
            future = caller.call_async("callee", there.echo_on_a_thread, (torch.ones(1 << 20),))
            if is_observed:
                future.add_done_callback(lambda done: None)
            result = weakref.ref(future.result().untyped_storage())
            kept = weakref.ref(future)
            del future
            assert kept() is None
            assert result() is None
    finally:
        gc.enable()
