"""References: objects stay at their owner, live while somebody holds them, and can be passed on."""

from __future__ import annotations

import gc
import time

import pytest

from tests.rpc import exposed_functions as there
from tests.rpc.conftest import MakeWorker
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.rpc import RpcWorker


def wait_until_empty(owner: RpcWorker, caller: RpcWorker) -> None:
    deadline_s = time.monotonic() + 20
    while len(owner.objects) and time.monotonic() < deadline_s:
        caller.ping(owner.name)
    assert len(owner.objects) == 0


def test_an_object_is_made_at_its_owner_and_its_methods_are_called_there(caller: RpcWorker) -> None:
    counter = caller.remote("callee", there.Counter, (5,))
    assert counter.owner_name() == "callee"
    assert not counter.is_owner()
    assert [counter.call("increase"), counter.call("increase", (), {"by": 10})] == [6, 16]
    assert counter.call_async("increase").result() == 17


def test_results_of_functions_can_stay_and_be_fetched(caller: RpcWorker) -> None:
    total = caller.remote("callee", there.add, (1, 2))
    assert total.to_here() == 3
    with pytest.raises(InvalidArgument, match="lives in another process"):
        total.local_value()


def test_only_public_methods_of_exposed_classes_can_be_called(caller: RpcWorker) -> None:
    counter = caller.remote("callee", there.Counter)
    for method in ("_secret", "__init__", "value", "nothing", "__class__"):
        with pytest.raises(InvalidArgument, match="no exposed method"):
            counter.call(method)
    hidden = caller.remote("callee", there.make_hidden_thing)
    with pytest.raises(InvalidArgument, match="no exposed method"):
        hidden.call("shout")


def test_an_object_that_could_not_be_made_says_so_in_every_use(caller: RpcWorker) -> None:
    broken = caller.remote("callee", there.Counter, (-1,))
    with pytest.raises(ValueError, match="begins at 0"):
        broken.call("increase")
    with pytest.raises(ValueError, match="begins at 0"):
        broken.to_here()


def test_an_object_goes_with_its_last_reference(make_worker: MakeWorker) -> None:
    owner = make_worker("owner")
    caller = make_worker("caller")
    counter = caller.remote("owner", there.Counter)
    assert counter.call("increase") == 1
    assert len(owner.objects) == 1
    del counter
    gc.collect()
    wait_until_empty(owner, caller)


def test_a_reference_can_be_passed_on_and_keeps_the_object_alive_at_its_taker(make_worker: MakeWorker) -> None:
    owner, taker, giver = (make_worker(name) for name in ("owner", "taker", "giver"))
    counter = giver.remote("owner", there.Counter)
    assert giver.call("taker", there.increase_through, (counter,)) == 10
    giver.call("taker", there.keep, (counter,))
    assert len(giver.references._given) == 2  # the giver keeps it alive until the taker has renewed
    taker._keep_house()
    giver.references.forget_given(float("inf"))
    del counter
    gc.collect()
    deadline_s = time.monotonic() + 20
    while owner.objects.holders(there.kept[0].key) != {"taker"} and time.monotonic() < deadline_s:
        giver.ping("owner")
    assert there.kept[0].call("increase") == 11
    there.kept.clear()
    gc.collect()
    wait_until_empty(owner, taker)


def test_an_object_goes_when_its_holder_is_gone(make_worker: MakeWorker) -> None:
    owner = make_worker("owner", lease_s=1.5)
    holder = make_worker("holder")
    counter = holder.remote("owner", there.Counter)
    assert counter.call("increase") == 1
    holder.close()  # without a word about its references
    wait_until_empty(owner, make_worker("watcher"))
    assert counter.key
