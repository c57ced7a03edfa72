"""Workers, servers and followers over the network: two servers, two workers, compared with training in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rpc.conftest import MakeWorker
from torsh_distributed.comm.store import open_store
from torsh_distributed.errors import InvalidArgument, TensorShapeMismatch
from torsh_distributed.rpc import RpcWorker
from torsh_distributed.rpc.parameters import (
    Consistency,
    ParameterClient,
    ParameterFollower,
    ParameterServer,
    RowTable,
)

SERVERS = ("ps0", "ps1")
Connect = Callable[..., ParameterClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Clients of two servers, by the name of their worker."""
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_store("memory://"))
        for name in SERVERS:
            stack.enter_context(ParameterServer(name, store=store))

        def one(name: str, kind: type[Any] = ParameterClient, **options: Any) -> Any:
            worker = stack.enter_context(RpcWorker(name, store))
            made = kind(SERVERS, worker=worker, timeout_s=60.0, **options)
            return stack.enter_context(made) if kind is ParameterClient else made

        yield one


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(num_steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(num_steps)]


def train(client: ParameterClient, mine: nn.Module, part: slice, num_steps: int, **options: Any) -> list[float]:
    """A worker's part of every batch; returns its losses."""
    losses = []
    consistency = Consistency(kind="bsp", num_workers=2)
    client.create(dict(mine.named_parameters()), consistency=consistency, **options)
    for inputs, targets in batches(num_steps):
        client.pull_into(mine)
        mine.zero_grad()
        loss = nn.functional.mse_loss(mine(inputs[part]), targets[part])
        loss.backward()
        losses.append(loss.item())
        client.push_from(mine, weight=inputs[part].shape[0])
    return losses


@pytest.mark.parametrize("options", [{"lr": 0.1, "momentum": 0.9}, {"optimizer": "AdamW", "lr": 0.01}])
def test_bsp_on_two_servers_has_the_losses_of_the_joint_batch(connect: Connect, options: dict[str, Any]) -> None:
    parts = {"w0": slice(0, 6), "w1": slice(6, 8)}  # of different sizes: the mean is over samples
    clients = {name: connect(name) for name in parts}
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(train, clients[name], model(), part, 8, **options) for name, part in parts.items()]
        first, second = (future.result() for future in futures)
    local = model()
    chosen = dict(options)
    optimizer = getattr(torch.optim, chosen.pop("optimizer", "SGD"))(local.parameters(), **chosen)
    for step, (inputs, targets) in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(local(inputs), targets)
        loss.backward()
        optimizer.step()
        assert (6 * first[step] + 2 * second[step]) / 8 == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    for name, value in clients["w0"].pull().items():
        torch.testing.assert_close(value, dict(local.named_parameters())[name].detach(), rtol=1e-5, atol=1e-6)
    stats = clients["w0"].stats()
    assert [one.version for one in stats.values()] == [8, 8]
    assert all(one.num_parameters for one in stats.values()), "both servers have a part"


def test_rows_of_a_table_on_two_servers_are_those_of_an_embedding(connect: Connect) -> None:
    client = connect("w0")
    client.create({"t": RowTable(num_rows=101, dim=4)}, lr=0.5, consistency=Consistency(kind="async"))
    rows = torch.tensor([[7, 100], [7, 0]])
    embedding = nn.Embedding(101, 4)
    with torch.no_grad():
        embedding.weight.copy_(client.pull_rows("t", torch.arange(101)))
    assert 0.005 < float(embedding.weight.detach().std()) < 0.02
    gradient = torch.randn(2, 2, 4)
    embedding(rows).backward(gradient)
    with torch.no_grad():
        embedding.weight -= 0.5 * embedding.weight.grad  # type: ignore[operator]
    client.push({}, {"t": (rows, gradient)})
    torch.testing.assert_close(client.pull_rows("t", rows), embedding(rows).detach())
    torch.testing.assert_close(client.pull_rows("t", torch.arange(101)), embedding.weight.detach())
    for bad in (torch.tensor([101]), torch.tensor([-1])):
        with pytest.raises(InvalidArgument, match=r"in the table|within the table"):
            client.pull_rows("t", bad)
        with pytest.raises(InvalidArgument, match="within the table"):
            client.push({}, {"t": (bad, torch.zeros(1, 4))})


@pytest.mark.parametrize(("push_codec", "pull_codec", "tolerance"), [("int8", "fp16", 0.02), ("topk:0.25", None, 0.3)])
def test_codecs_both_ways_are_near_to_what_travels_whole(
    connect: Connect, push_codec: str, pull_codec: str | None, tolerance: float
) -> None:
    client = connect("w0", push_codec=push_codec, pull_codec=pull_codec)
    torch.manual_seed(0)
    start, gradient = torch.randn(64, 32), torch.randn(64, 32)
    client.create({"w": start}, lr=0.1, consistency=Consistency(kind="async"))
    for _ in range(20):
        client.pull()
        client.push({"w": gradient})
    # What a message leaves out comes with a later one, so the sum of all is near to the sum of the gradients.
    found = client.pull()["w"]
    assert float((found - (start - 0.1 * 20 * gradient)).norm() / (2.0 * gradient).norm()) < tolerance
    rows = connect("w1", push_codec=push_codec, pull_codec=pull_codec)
    rows.join()
    assert torch.equal(rows.pull()["w"], found)


def test_codecs_that_leave_values_out_are_not_for_parameters(make_worker: MakeWorker) -> None:
    worker = make_worker("w")
    with pytest.raises(InvalidArgument, match="not for parameters"):
        ParameterClient(["ps0"], worker=worker, pull_codec="topk:0.1")
    with pytest.raises(InvalidArgument, match="not for gradients to a server"):
        ParameterClient(["ps0"], worker=worker, push_codec="powersgd:2")


def test_followers_take_whole_publications_while_workers_push(connect: Connect) -> None:
    client, follower = connect("w0"), connect("follower", ParameterFollower)
    # Every push adds 1 to all elements, so a torn copy would have two values.
    start = {f"p{index}": torch.zeros(50_000) for index in range(4)}
    client.create(start, lr=1.0, consistency=Consistency(kind="bsp"))
    gradient = {name: -torch.ones(50_000) for name in start}

    def train_and_publish() -> None:
        for step in range(12):
            client.pull()
            client.push(gradient)
            if step % 3 == 2:
                client.publish()

    with ThreadPoolExecutor(1) as threads:
        training = threads.submit(train_and_publish)
        numbers = []
        while not numbers or numbers[-1] < 4:
            found = follower.next()
            numbers.append(found.number)
            values = torch.cat(list(found.tensors.values()))
            assert values.unique().tolist() == [3.0 * found.number]
            assert set(found.versions.values()) == {3 * found.number}
        training.result()
    assert numbers == sorted(set(numbers))


def test_mistakes_are_named_with_the_parameter(connect: Connect) -> None:
    client = connect("w0")
    with pytest.raises(InvalidArgument, match="has not joined"):
        client.push({})
    with pytest.raises(InvalidArgument, match="'NoSuch' is not an optimizer"):
        client.create({"w": torch.zeros(2)}, optimizer="NoSuch")
    client.create({"w": torch.zeros(2), "t": RowTable(num_rows=4, dim=2)}, lr=1.0)
    with pytest.raises(InvalidArgument, match="no server has a parameter of this name: it is a table"):
        client.pull(["t"])
    with pytest.raises(TensorShapeMismatch, match="does not have its parameter's shape"):
        client.push({"w": torch.zeros(3)})
    with pytest.raises(InvalidArgument, match="has not joined"):
        client.push({"w": torch.zeros(2)})
    client.join()  # as its message says
    client.set_options(lr=2.0)
    client.push({"w": torch.ones(2)})
    assert client.pull()["w"].tolist() == [-2.0, -2.0]


def test_a_module_with_other_names_is_refused_and_not_left_as_it_is(connect: Connect) -> None:
    client, mine = connect("w0"), model()
    client.create(dict(mine.named_parameters()), lr=0.1)
    with pytest.raises(InvalidArgument, match="no parameter of this module is on the servers"):
        client.pull_into(nn.Sequential(mine))
    client.pull_into(mine)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("codec", [None, "int8", "topk:0.5"])
def test_gradients_and_rows_of_a_gpu_reach_parameters_on_the_cpu(connect: Connect, codec: str | None) -> None:
    client, mine = connect("w0", push_codec=codec), model().cuda()
    client.create({**dict(mine.named_parameters()), "words": RowTable(num_rows=9, dim=4)}, lr=0.1)
    rows = torch.tensor([1, 4, 8], device="cuda")
    before = client.pull_rows("words", rows)
    assert before.is_cuda
    gradients = {name: torch.ones_like(param) for name, param in mine.named_parameters()}
    client.push(gradients, {"words": (rows, torch.ones_like(before))})
    client.pull_into(mine)
    torch.testing.assert_close(client.pull_rows("words", rows), before - 0.1, rtol=0, atol=2e-3)
    assert all(param.is_cuda for param in mine.parameters())
