"""Messages that are lost, or reported lost: a call says which, references are freed, pushes count exactly once."""

from __future__ import annotations

import contextlib
import gc
import random
import time

import pytest
import torch
from torch import Tensor

from tests.rpc import exposed_functions as there
from tests.rpc.conftest import MakeWorker
from tests.rpc.message_faults import FAULTS, MessageFault, failing, once
from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import CommunicationError, OperationTimeout, TorshError
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.messages.lane_pair import CALL, ERROR, REMOTE, REPLY
from torsh_distributed.rpc.parameters import ParameterClient, ParameterServer, server_links

NUM_STEPS = 30


@pytest.mark.parametrize(
    ("fault", "error", "sentence", "runs"),
    [
        ("request lost", OperationTimeout, "did not end in time", (0,)),
        ("reply lost", OperationTimeout, "did not end in time", (1,)),
        # The callee gives up what has not begun when it sees the connection end.
        ("delivered but reported lost", CommunicationError, "the connection to callee was lost", (0, 1)),
    ],
)
def test_a_call_says_what_is_known_and_is_not_repeated(
    caller: RpcWorker, fault: MessageFault, error: type[TorshError], sentence: str, runs: tuple[int, ...]
) -> None:
    with failing(fault, CALL, (REPLY, ERROR), once()) as failed, pytest.raises(error, match=sentence):
        caller.call("callee", there.keep, ("x",), timeout_s=0.3)
    assert len(failed) == 1
    assert caller.call("callee", there.add, (1, 2)) == 3  # over a new connection where the old one is gone
    assert len(there.kept) in runs


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reference_whose_making_is_not_known_raises_in_its_use_and_leaves_no_object(
    make_worker: MakeWorker, fault: MessageFault
) -> None:
    owner = make_worker("owner", lease_s=0.3)
    caller = make_worker("caller", lease_s=0.3, timeout_s=0.3)
    with failing(fault, REMOTE, (REPLY, ERROR), once()) as failed, pytest.raises(TorshError):
        # torch's form: the reference is there at once, and its first use says what is known.
        caller.remote("owner", there.Counter, (1,)).wait_until_created()
    assert len(failed) == 1
    assert caller.remote("owner", there.Counter, (5,)).call("increase", (1,)) == 6
    gc.collect()
    deadline_s = time.monotonic() + 20
    while len(owner.objects) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert len(owner.objects) == 0


def gradient(weights: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Depends on the parameters, so a push that is lost or counts twice changes all that follow."""
    generator = torch.Generator().manual_seed(step)
    return {name: value * 0.1 + torch.randn(value.shape, generator=generator) for name, value in weights.items()}


def begin() -> dict[str, Tensor]:
    return {"a": torch.ones(40, 30), "b": torch.arange(5.0)}


@pytest.mark.parametrize("fault", FAULTS)
def test_pushes_count_exactly_once_and_give_the_bits_of_one_process(
    fault: MessageFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_links, "_CALL_S", 0.1)
    weights = {name: torch.nn.Parameter(value) for name, value in begin().items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.05)
    for step in range(NUM_STEPS):
        for name, value in gradient({name: one.detach() for name, one in weights.items()}, step).items():
            weights[name].grad = value
        optimizer.step()
    points = random.Random(7)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store("memory://"))
        for name in ("ps0", "ps1"):
            stack.enter_context(ParameterServer(name, store=store))
        worker = stack.enter_context(RpcWorker("w", store))
        client = stack.enter_context(ParameterClient(["ps0", "ps1"], worker=worker, timeout_s=60))
        client.create(begin(), optimizer="Adam", lr=0.05)
        with failing(fault, CALL, (REPLY, ERROR), lambda: points.random() < 0.1) as failed:
            for step in range(NUM_STEPS):
                client.push(gradient(client.pull(), step))
            found = client.pull()
        stats = client.stats()
    assert len(failed) > 2
    for name, value in weights.items():
        assert torch.equal(found[name], value.detach()), name
    assert [one.version for one in stats.values()] == [NUM_STEPS] * 2
    if fault == "reply lost":
        assert sum(one.num_repeated for one in stats.values()) > 0
