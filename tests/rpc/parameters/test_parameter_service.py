"""One server's rules, without a network: who waits for whom, and that a push counts once whatever is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torsh_distributed.errors import BackendNotInitialized, InvalidArgument, TensorShapeMismatch
from torsh_distributed.rpc.parameters.parameter_service import ParameterService
from torsh_distributed.rpc.parameters.push_rounds import Consistency
from torsh_distributed.rpc.parameters.shard import RowTable

Make = Callable[..., ParameterService]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Servers over one directory, each the successor of the one before."""
    made: list[ParameterService] = []

    def one(**options: Any) -> ParameterService:
        made.append(ParameterService(tmp_path / "kept", **options))
        return made[-1]

    yield one
    for service in made:
        service._stop()


def begin(service: ParameterService, kind: Any, *workers: str, staleness: int = 0) -> None:
    consistency = Consistency(kind=kind, staleness=staleness, num_workers=len(workers))
    service.create({"w": torch.zeros(2)}, {}, "SGD", {"lr": 1.0}, consistency, [0, 1])
    for worker in workers:
        service.join(worker)


def push(service: ParameterService, worker: str, sequence: int, value: float, base: int | None = None) -> Future[int]:
    incarnation = service._rounds.member(worker).incarnation
    return service.push(worker, incarnation, sequence, base, 1.0, {"w": torch.full((2,), value)}, {})


def weights(service: ParameterService) -> list[float]:
    return service.pull(["w"], None)[1]["w"].tolist()  # type: ignore[union-attr]


def test_with_bsp_a_step_is_the_mean_of_one_push_of_each_worker(make: Make) -> None:
    service = make()
    begin(service, "bsp", "a", "b")
    first = push(service, "b", 1, 4.0)
    assert not first.done()
    second = push(service, "a", 1, 2.0)
    assert (first.result(0), second.result(0)) == (1, 1)
    assert weights(service) == [-3.0, -3.0]


def test_a_repeated_push_is_answered_from_the_record_by_this_server_and_by_the_next(make: Make) -> None:
    service = make()
    begin(service, "async", "a")
    assert push(service, "a", 1, 1.0).result(0) == 1
    assert push(service, "a", 1, 1.0).result(0) == 1
    successor = make()
    assert push(successor, "a", 1, 1.0).result(0) == 1
    assert push(successor, "a", 2, 1.0).result(0) == 2
    assert weights(successor) == [-2.0, -2.0]
    assert successor.stats().num_repeated == 1


def test_a_push_that_is_repeated_while_it_waits_counts_once(make: Make) -> None:
    service = make()
    begin(service, "bsp", "a", "b")
    tries = [push(service, "a", 1, 2.0) for _ in range(3)]
    push(service, "b", 1, 4.0)
    assert [one.result(0) for one in tries] == [1, 1, 1]
    assert weights(service) == [-3.0, -3.0]


def test_a_push_that_was_not_answered_is_not_known_to_the_next_server(make: Make) -> None:
    service = make()
    begin(service, "bsp", "a", "b")
    push(service, "a", 1, 100.0)
    successor = make()
    push(successor, "a", 1, 2.0)
    assert push(successor, "b", 1, 4.0).result(0) == 1
    assert weights(successor) == [-3.0, -3.0]


def test_with_bounded_staleness_who_is_too_far_ahead_waits_for_the_slowest(make: Make) -> None:
    service = make()
    begin(service, "bounded", "a", "b", staleness=1)
    assert push(service, "a", 1, 1.0).result(0) == 1
    ahead = push(service, "a", 2, 1.0)
    assert not ahead.done()
    assert weights(service) == [-2.0, -2.0]  # applied, only not answered
    push(service, "b", 1, 1.0)
    assert ahead.result(0) == 2


def test_who_leaves_or_is_lost_is_not_waited_for(make: Make) -> None:
    service = make(lost_after_s=1.0)
    begin(service, "bsp", "a", "b", "c")
    of_c = service._absences.present("c")
    waiting = push(service, "a", 1, 5.0)
    service.leave("b", 1)
    # a has no connection here, so it is lost after its time, and its push with it.
    with pytest.raises(InvalidArgument, match="the worker has left"):
        waiting.result(30)
    service.join("a")
    service._absences.present("a")
    waiting = push(service, "a", 1, 5.0)
    assert not waiting.done()
    service._absences.absent("c", of_c)
    assert waiting.result(30) == 1
    assert weights(service) == [-5.0, -5.0]


def test_a_process_that_joined_again_is_the_only_one_of_its_name(make: Make) -> None:
    service = make()
    begin(service, "bsp", "a", "b")
    of_the_old = push(service, "a", 1, 100.0)
    assert service.join("a") == {"incarnation": 2, "sequence": 0}
    with pytest.raises(InvalidArgument, match="another process joined"):
        of_the_old.result(0)
    with pytest.raises(InvalidArgument, match="another process has joined under its name"):
        service.push("a", 1, 1, None, 1.0, {"w": torch.full((2,), 100.0)}, {})
    push(service, "a", 1, 2.0)
    assert push(service, "b", 1, 4.0).result(0) == 1
    assert weights(service) == [-3.0, -3.0]


@pytest.mark.parametrize(("kind", "staleness", "most_behind"), [("bsp", 0, 0), ("bounded", 1, 3), ("async", 0, 10**6)])
def test_a_gradient_of_a_version_that_is_too_old_is_refused(
    make: Make, kind: str, staleness: int, most_behind: int
) -> None:
    service = make()
    begin(service, kind, "a", staleness=staleness)
    num_pushes = min(most_behind, 5) + 1
    for number in range(num_pushes):
        push(service, "a", number + 1, 1.0, base=number)
    if most_behind >= num_pushes:
        assert push(service, "a", num_pushes + 1, 1.0, base=0).done()
        return
    with pytest.raises(InvalidArgument, match=f"of version 0, and the parameters are at version {num_pushes}"):
        push(service, "a", num_pushes + 1, 1.0, base=0)
    assert service.stats().num_refused == 1


def test_bad_pushes_are_refused_and_change_nothing(make: Make) -> None:
    service = make()
    with pytest.raises(BackendNotInitialized):
        service.pull(None, None)
    begin(service, "async", "a")
    for whole in ({"w": torch.zeros(3)}, {"other": torch.zeros(2)}):
        with pytest.raises((TensorShapeMismatch, InvalidArgument)):
            service.push("a", 1, 1, None, 1.0, whole, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="one after the other"):
        push(service, "a", 3, 1.0)
    with pytest.raises(InvalidArgument, match="has left, or was lost"):
        push(service, "nobody", 1, 1.0)
    with pytest.raises(InvalidArgument, match="other parameters, another optimizer"):
        service.create({"w": torch.zeros(2)}, {}, "SGD", {"lr": 2.0}, Consistency(kind="async"), [0, 1])
    assert weights(service) == [0.0, 0.0]
    assert service.stats().version == 0


def test_an_optimizer_that_raises_leaves_everything_as_it_was(make: Make) -> None:
    service = make()
    consistency = Consistency(kind="async")
    # Its first step works and makes state; a gradient of another kind of number cannot be cast.
    service.create({"w": torch.zeros(2), "x": torch.zeros(2)}, {}, "LBFGS", {}, consistency, [0, 1])
    service.join("a")
    with pytest.raises(TypeError, match="closure"):
        push(service, "a", 1, 1.0)
    assert weights(service) == [0.0, 0.0]
    assert service._rounds.member("a").sequence == 0


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    ("NAdam", {"lr": 0.1}),
    ("Rprop", {"lr": 0.1}),
    ("ASGD", {"lr": 0.1}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=[name for name, _ in OPTIMIZERS])
def test_any_optimizer_does_what_it_does_locally_with_a_new_server_at_every_step(
    make: Make, optimizer: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    local = nn.Parameter(start.clone())
    mine = getattr(torch.optim, optimizer)([local], **options)
    service = make()
    service.create({"w": start}, {}, optimizer, options, Consistency(kind="async"), [0, 1])
    service.join("a")
    for number in range(5):
        gradient = torch.randn(4, 3)
        local.grad = gradient.clone()
        mine.step()
        assert service.push("a", 1, number + 1, None, 1.0, {"w": gradient}, {}).result(0) == number + 1
        service._stop()
        service = make()
        assert torch.equal(service.pull(None, None)[1]["w"], local.detach())  # type: ignore[arg-type]


ROW_OPTIMIZERS: list[tuple[str, dict[str, Any], Any]] = [
    ("SGD", {"lr": 0.1}, lambda params: torch.optim.SGD(params, lr=0.1)),
    ("Adagrad", {"lr": 0.1}, lambda params: torch.optim.Adagrad(params, lr=0.1)),
    ("Adam", {"lr": 0.1}, lambda params: torch.optim.SparseAdam(params, lr=0.1)),
]


@pytest.mark.parametrize(("name", "options", "local"), ROW_OPTIMIZERS, ids=[row[0] for row in ROW_OPTIMIZERS])
def test_rows_of_a_table_are_trained_as_a_sparse_embedding_is(
    make: Make, name: str, options: dict[str, Any], local: Any
) -> None:
    service = make()
    service.create({}, {"t": RowTable(num_rows=20, dim=3)}, name, options, Consistency(kind="async"), [0, 1])
    service.join("a")
    everything = torch.arange(20)
    embedding = nn.Embedding(20, 3, sparse=name == "Adam")
    with torch.no_grad():
        embedding.weight.copy_(service.pull_rows({"t": everything}, None)[1]["t"])  # type: ignore[arg-type]
    optimizer = local(embedding.parameters())
    generator = torch.Generator().manual_seed(1)  # where gradients nearly cancel, torch's two Adams differ by their eps
    for number in range(4):
        rows = torch.tensor([3, 7, 3, number])
        gradient = torch.randn(4, 3, generator=generator)
        embedding.zero_grad()
        embedding(rows).backward(gradient)
        optimizer.step()
        service.push("a", 1, number + 1, None, 1.0, {}, {"t": (rows, gradient)}).result(0)
        service = make()
    found = service.pull_rows({"t": everything}, None)[1]["t"]
    torch.testing.assert_close(found, embedding.weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {"momentum": 0.9, "dampening": 0.5}), ("NAdam", {}), ("LBFGS", {})]
)
def test_an_optimizer_that_cannot_keep_rows_apart_is_refused_for_tables(
    make: Make, name: str, options: dict[str, Any]
) -> None:
    service = make()
    with pytest.raises(InvalidArgument, match="cannot update single rows"):
        service.create({}, {"t": RowTable(num_rows=4, dim=2)}, name, options, Consistency(), [0, 1])
    begin(service, "async", "a")  # nothing of it has stayed
    assert push(service, "a", 1, 1.0).result(0) == 1
