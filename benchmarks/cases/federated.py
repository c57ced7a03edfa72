"""Federated training: rounds of a simulation beside Flower's and pfl's, rounds over TLS, secure aggregation."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.federated_tasks import EmptyRounds
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed.world import ROOT
from tests.federated.robust.hostile_digits import ATTACKS, NOT_FINITE, NUM_CLIENTS, accuracy
from tests.federated.strategies.synthetic_points import accuracies
from torsh_distributed.federated import ClientUpdate, FederatedConfig, RoundServer, SecureAggregation
from torsh_distributed.federated.deployment.device_messages import pack_update
from torsh_distributed.federated.deployment.identity.device_identity import DeviceKey
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.privacy.secure_sum.sum_collector import SumCollector
from torsh_distributed.federated.privacy.secure_sum.sum_member import SumMember
from torsh_distributed.federated.privacy.secure_sum.sum_roster import SUM_STEPS, SumContext
from torsh_distributed.federated.robust.base import RobustRule
from torsh_distributed.federated.robust.registry import rule_named
from torsh_distributed.federated.rounds.round_loop import RoundLoop

_NUM_CLIENTS, _NUMEL, _MOST_LOST = 20, 100_000, 7
_STEPS = ("work", *SUM_STEPS)
_DEVICES = 10
_WARM_ROUNDS = 2
_RULES = {"median": 6, "trimmed_mean": 6, "multi_krum": 6, "bulyan": 4}
"""With how many hostile clients of 20."""


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
    if budget.wants("rounds"):
        yield from _simulated(budget)
    if budget.wants("devices"):
        yield from _over_tls(budget)
    if budget.wants("secure"):
        yield from _secure(budget)
    if budget.wants("hostile"):
        yield from _hostile(budget)
    if budget.wants("stragglers"):
        yield from _stragglers(budget)


def _run(python: str, module: str, *args: object) -> dict[str, Any]:
    """What a process of one side prints last."""
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), *([str(ROOT / "src")] if python == sys.executable else [])])
    done = subprocess.run(
        [python, "-m", f"benchmarks.{module}", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, **quiet, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _simulated(budget: Budget) -> Iterator[Row | Note]:
    num_rounds = 4 if budget.is_quick else 40
    sides = {
        "ours": (sys.executable, "torsh_rounds", num_rounds, 1),
        "two": (sys.executable, "torsh_rounds", num_rounds, 2),
    }
    missing = []
    for name, module, rounds in (("pfl", "pfl_rounds", num_rounds), ("flwr", "flower_rounds", 3)):
        python = ROOT / "build" / name / "bin" / "python"
        if python.exists():
            sides[name] = (str(python), module, rounds)
        else:
            missing.append(name)
    if missing:
        yield Note(
            text=f"Without rows of {' and '.join(missing)}: see `benchmarks/pfl.txt` and `benchmarks/flower.txt`."
        )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(1 if budget.is_quick else 3):
        for name, side in sides.items():
            if name != "flwr" or not turn:
                found[name].append(_run(*side))
    rates = {
        name: Measurement.of([1 / took_s for one in runs for took_s in (one["times"][_WARM_ROUNDS:] or one["times"])])
        for name, runs in found.items()
    }
    names = {"pfl": "pfl", "flwr": "Flower"}
    rivals = {names[name]: rate for name, rate in rates.items() if name in names}
    what = "digits, 1,000 clients, 100 a round"
    yield Row(name=f"{what}, 1 process: rounds", unit=Unit.PER_SECOND, ours=rates["ours"], rivals=rivals)
    yield Row(name=f"{what}, 2 processes: rounds", unit=Unit.PER_SECOND, ours=rates["two"], rivals=rivals)
    peaks = {
        name: Measurement.of([one["peak_bytes"] for one in runs]) for name, runs in found.items() if name != "flwr"
    }
    pfl = {"pfl": peaks["pfl"]} if "pfl" in peaks else {}
    yield Row(name=f"{what}, 1 process: peak memory", unit=Unit.BYTES, ours=peaks["ours"], rivals=pfl)
    yield Row(name=f"{what}, 2 processes: peak memory", unit=Unit.BYTES, ours=peaks["two"], rivals=pfl)
    accuracies = ", ".join(f"{name} {runs[0]['accuracy']:.3f}" for name, runs in found.items())
    yield Note(text=f"rounds: accuracy on all digits after each side's rounds: {accuracies}.")


def _over_tls(budget: Budget) -> Iterator[Row]:
    num_rounds = 5 if budget.is_quick else 50
    config = FederatedConfig(rounds=num_rounds, clients_per_round=_DEVICES, min_clients=_DEVICES)
    task = EmptyRounds()
    replica = ModelVector(task.model())
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder)
        file = place / "task.py"
        file.write_text("from benchmarks.federated_tasks import EmptyRounds\n\nTASK = EmptyRounds()\n")
        server = RoundServer(
            config, directory=place / "server", fingerprint=replica.fingerprint, numel=replica.numel, deadline_s=120.0
        )
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        for index in range(_DEVICES):
            name = f"d-{index}"
            options = ["--name", name, "--directory", str(place / name), "--token", server.new_token()]
            command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "federated", "join"]
            process = subprocess.Popen(
                [*command, "{}:{}".format(*server.address), str(file), *options],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            stack.callback(process.wait, 30)
        stack.callback(server.close, is_done=True)  # before the devices are waited for
        records = RoundLoop(task, config, server).run().rounds
        server.close(is_done=True)
    times = [record.duration_s for record in records[_WARM_ROUNDS:]]
    yield Row(name=f"an empty round over TLS, {_DEVICES} processes", unit=Unit.SECONDS, ours=Measurement.of(times))


def _secure(budget: Budget) -> Iterator[Row | Note]:
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


def _hostile(budget: Budget) -> Iterator[Note]:
    """What attacks cost in accuracy. It does not depend on how busy the machine is."""
    seeds, rounds = (1, 2) if budget.is_quick else (5, 80)
    for alpha, data in ((None, "data alike"), (1.0, "data by Dirichlet(1)")):
        for name, hostile in _RULES.items():
            rule = rule_named(name, hostile)
            rule.mixing = True

            def points(attack: str | None, rule: RobustRule = rule, alpha: float | None = alpha) -> list[float]:
                return [100 * accuracy(rule, attack, alpha=alpha, seed=seed, rounds=rounds) for seed in range(seeds)]

            clean = points(None)
            lost = {
                attack: max(before - after for before, after in zip(clean, points(attack), strict=True))
                for attack in (*ATTACKS, NOT_FINITE)
            }
            shown = ", ".join(f"{attack.replace('_', ' ')} {most:.1f}" for attack, most in lost.items())
            yield Note(
                text=f"{name} with mixing, {hostile} of {NUM_CLIENTS} clients hostile, {data}, {rounds} rounds: "
                f"{sum(clean) / seeds:.1f} % without attack; most points lost of {seeds} seeds: {shown}."
            )


def _stragglers(budget: Budget) -> Iterator[Note]:
    rounds = 1 if budget.is_quick else 80
    for seed in range(1 if budget.is_quick else 3):
        averaged, proximal = accuracies(seed=seed, rounds=rounds, stragglers=0.9)
        yield Note(
            text=f"synthetic(1, 1), 90 % stragglers, {rounds} rounds, seed {seed}: FedAvg without them "
            f"{100 * averaged:.1f} %, FedProx with what they did {100 * proximal:.1f} %."
        )


CASE = Case(
    title="Federated training",
    about="""Rounds of 100 of 1,000 virtual clients that each train a small network for an epoch on one or two digits,
    in processes of each library, in turns; of Flower, which takes seconds for a round, in the first turn only. A round
    over TLS with ten processes whose training is empty. A secure sum with all clients and the server in one process:
    the masked upload beside a plain update in float32, what a client computes in a round besides training, and what
    the server does for all. Accuracy under attacks, with robust rules; and with stragglers, on the data of FedProx's
    paper.""",
    rows=_rows,
    parts=("rounds", "devices", "secure", "hostile", "stragglers"),
)
