"""Pipe in one process: the result of the plain module, whatever is recomputed; mistakes raise as in FairScale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torsh_distributed.migrate.fairscale.pipe import skip_connections
from torsh_distributed.migrate.fairscale.pipe.balance_by import balance_by_size, balance_by_time
from torsh_distributed.migrate.fairscale.pipe.device_pipe import Pipe
from torsh_distributed.migrate.fairscale.recomputing import is_checkpointing, is_recomputing

CPUS = ["cpu", "cpu"]


class Noted(nn.Module):
    """Notes how often each kind of forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append((is_checkpointing(), is_recomputing()))
        return value


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Noted(), nn.Linear(8, 2))


@pytest.mark.parametrize(("mode", "num_recomputed"), [("always", 2), ("except_last", 1), ("never", 0)])
def test_recomputing_changes_no_gradient_and_no_running_mean(mode: str, num_recomputed: int) -> None:
    batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    found = []
    for chosen in (mode, "never"):
        pipe = Pipe(layers(), [3, 2], devices=CPUS, chunks=2, checkpoint=chosen)
        torch.manual_seed(2)
        pipe(batch).square().sum().backward()
        grads = [param.grad for param in pipe.parameters()]
        found.append([*grads, pipe.partitions[0][1].running_mean])
        seen = pipe[3].seen
        wanted = num_recomputed if chosen == mode else 0
        assert seen == [(index < wanted, False) for index in range(2)] + [(False, True)] * wanted
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_running_means_are_those_of_whole_batches(mode: str, momentum: float | None) -> None:
    def norms() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm2d(3, momentum=momentum), nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)))

    plain, pipe = norms(), Pipe(norms(), [1, 1], devices=CPUS, chunks=3, checkpoint=mode, deferred_batch_norm=True)
    first = plain[0]
    for step in range(3):
        batch = torch.randn(7, 3, 2, 2, generator=torch.Generator().manual_seed(step)) * 3 + 1
        first(batch)
        pipe(batch).square().sum().backward()
    kept = pipe.state_dict()
    assert kept.keys() == {f"partitions.{name.split('.')[0]}.{name}" for name in plain.state_dict()}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(kept[f"partitions.0.0.{name}"], first.state_dict()[name])
    plain.load_state_dict({name.split(".", 2)[2]: value for name, value in kept.items()})
    torch.testing.assert_close(pipe.eval()(batch), plain.eval()(batch))


def test_mistakes_are_those_of_fairscale() -> None:
    with pytest.raises(ValueError, match="balance is required"):
        Pipe(layers(), devices=CPUS)
    with pytest.raises(ValueError, match="different length"):
        Pipe(layers(), [1, 1], devices=CPUS)
    with pytest.raises(IndexError, match="too few devices"):
        Pipe(layers(), [3, 2], devices=["cpu"])
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        Pipe(nn.Linear(2, 2), [1], devices=CPUS)  # type: ignore[arg-type]  # a mistake
    pipe = Pipe(layers(), [3, 2], devices=CPUS)
    with pytest.raises(TypeError, match="denied to move"):
        pipe.to("cpu")
    assert pipe.to(torch.float64)[0].weight.dtype == torch.float64
    assert [type(one).__name__ for one in pipe] == ["Linear", "BatchNorm1d", "Dropout", "Noted", "Linear"]


@skip_connections.skippable(stash=["skip"])
class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> Iterator[object]:
        out = self.linear(value)
        yield skip_connections.StashCall("skip", out)
        return out.tanh()


@skip_connections.skippable(pop=["skip"])
class Taken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor) -> Iterator[object]:
        skip = yield skip_connections.PopCall("skip")
        return self.linear(value) * skip


def skipping() -> nn.Sequential:
    """Two pairs, one inside the other, apart by their namespaces."""
    torch.manual_seed(0)
    outer, inner = skip_connections.SkipNamespace(), skip_connections.SkipNamespace()
    return nn.Sequential(
        Kept().isolate(outer), Kept().isolate(inner), nn.Linear(4, 4), Taken().isolate(inner), Taken().isolate(outer)
    )


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_skip_connections_go_past_stages(mode: str) -> None:
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = skipping()
    plain(batch).square().sum().backward()
    pipe = Pipe(skipping(), [1, 2, 1, 1], devices=["cpu"] * 4, chunks=3, checkpoint=mode)
    pipe(batch).square().sum().backward()
    for one, two in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)
    with torch.no_grad():
        torch.testing.assert_close(pipe.eval()(batch), plain(batch))


def test_pairs_that_do_not_match_are_named_before_anything_runs() -> None:
    with pytest.raises(TypeError, match="no module declared 'skip' as poppable"):
        Pipe(nn.Sequential(Kept(), nn.Linear(4, 4)), [1, 1], devices=CPUS)
    with pytest.raises(TypeError, match="as stashable before '0'"):
        Pipe(nn.Sequential(Taken(), Kept()), [1, 1], devices=CPUS)


def test_layers_are_balanced_by_what_they_cost() -> None:
    chain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1024))
    assert balance_by_size(2, chain, torch.randn(4, 64), device="cpu") == [3, 1]
    assert sum(balance_by_time(2, chain, torch.randn(4, 64), timeout=0.01, device="cpu")) == 4
