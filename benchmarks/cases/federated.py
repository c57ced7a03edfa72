"""Federated training: what secure aggregation sends and takes, beside the plain update of a device."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from torsh_distributed.federated import ClientUpdate, SecureAggregation
from torsh_distributed.federated.deployment.device_messages import pack_update
from torsh_distributed.federated.deployment.identity.device_identity import DeviceKey
from torsh_distributed.federated.privacy.secure_sum.sum_collector import SumCollector
from torsh_distributed.federated.privacy.secure_sum.sum_member import SumMember
from torsh_distributed.federated.privacy.secure_sum.sum_roster import SUM_STEPS, SumContext

_NUM_CLIENTS, _NUMEL, _MOST_LOST = 20, 100_000, 7
_STEPS = ("work", *SUM_STEPS)


class _Sum:
    """One secure sum in this process, with what each side took."""

    def __init__(self, keys: dict[str, DeviceKey], numel: int, step: str | None) -> None:
        """`step`: at which the most clients that may be lost do not answer; None: all answer."""
        settings = SecureAggregation()
        context = SumContext(settings=settings, fingerprint="benchmark", numel=numel, round=0, attempt=0)
        updates = {name: settings.on_grid(torch.empty(numel).uniform_(-1, 1)) for name in keys}
        self.client_s = self.server_s = 0.0
        self.upload_bytes = 0
        began_s = time.perf_counter()
        members = {
            name: SumMember(context, updates[name], 1, name=name, signer=key, unknown=lambda _: [])
            for name, key in keys.items()
        }
        self.client_s += time.perf_counter() - began_s
        collector = SumCollector(context, {name: key.public for name, key in keys.items()}, settings.fewest)
        lost = set(sorted(keys)[:_MOST_LOST])
        for name in sorted(keys.keys() - (lost if step == "work" else set())):
            collector.take_keys(name, members[name].keys())
        for one in SUM_STEPS:
            began_s = time.perf_counter()
            messages = collector.messages(one)
            self.server_s += time.perf_counter() - began_s
            for name in sorted(messages.keys() - (lost if step == one else set())):
                began_s = time.perf_counter()
                answer = members[name].answer(one, messages[name])
                answered_s = time.perf_counter()
                collector.take(one, name, answer)
                self.client_s += answered_s - began_s
                self.server_s += time.perf_counter() - answered_s
                if one == "sealed":
                    self.upload_bytes = len(answer)
        began_s = time.perf_counter()
        total, _ = collector.total()
        self.server_s += time.perf_counter() - began_s
        self.num_updates = len(collector.delivered)
        expected = torch.stack([settings.steps(updates[name]) for name in collector.delivered]).sum(dim=0)
        self.is_exact = torch.equal(total, expected)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    with tempfile.TemporaryDirectory() as folder:
        keys = {f"d-{i:02}": DeviceKey.load_or_make(Path(folder) / f"{i}") for i in range(_NUM_CLIENTS)}
        num_samples = 1 if budget.is_quick else 5
        _Sum(keys, 100, None)  # imports, and the plan of who shares with whom
        found = [_Sum(keys, _NUMEL, None) for _ in range(num_samples)]
        update = ClientUpdate(client="d-00", round=0, delta=torch.zeros(_NUMEL), num_samples=1, num_steps=1)
        what = f"secure aggregation, {_NUM_CLIENTS} clients, {_NUMEL:,} values"
        yield Row(
            name=f"{what}: upload",
            unit=Unit.BYTES,
            ours=Measurement.of([one.upload_bytes for one in found]),
            rivals={"float32 update": Measurement.of([len(pack_update(update))])},
        )
        yield Row(
            name=f"{what}: a client's work",
            unit=Unit.SECONDS,
            ours=Measurement.of([one.client_s / _NUM_CLIENTS for one in found]),
        )
        servers = Measurement.of([one.server_s for one in found])
        yield Row(name=f"{what}: the server's work", unit=Unit.SECONDS, ours=servers)
        lossy = {step: _Sum(keys, _NUMEL, step) for step in _STEPS}
        wrong = [step for step, one in lossy.items() if not one.is_exact] + ["none"] * (not found[0].is_exact)
        if wrong:
            raise AssertionError(f"the sum is not exact with clients lost at {', '.join(wrong)}")
        counts = ", ".join(f"{step} {one.num_updates}" for step, one in lossy.items())
        yield Note(
            text=f"Secure aggregation: the sum of integers was exact with nobody lost, and with {_MOST_LOST} of "
            f"{_NUM_CLIENTS} clients lost at each step. Updates in the sum, by the step: {counts}."
        )


CASE = Case(
    title="Federated training",
    about=(
        "A secure sum with all clients and the server in one process: the masked upload beside a plain update in "
        "float32, what a client computes in a round besides training, and what the server does for all."
    ),
    rows=_rows,
)
