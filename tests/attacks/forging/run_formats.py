"""Formats of runs and machines, forged and read: events, plans, records of jobs, lists of hosts, rules."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from typer.testing import CliRunner

from tests.attacks.forging.mutations import damaged_bytes, evil_value, mutated
from torsh_distributed import events
from torsh_distributed.cli.app import app
from torsh_distributed.cli.trace.tune_command import _recorded
from torsh_distributed.clusters.job_records import all_records
from torsh_distributed.clusters.local.background_jobs import background_status
from torsh_distributed.clusters.ranks.rank_reports import first_failure
from torsh_distributed.elastic.faults.fault_log import fault_outcomes, read_fault_log
from torsh_distributed.migrate.deepspeed.deepspeed_line import read_resources
from torsh_distributed.migrate.horovod.launching.horovodrun_yaml import config_flags
from torsh_distributed.migrate.horovod.launching.host_slots import read_hostfile
from torsh_distributed.observe.alerts.alert_rules import read_rules
from torsh_distributed.plan import Plan


def command(*words: object) -> None:
    """A `torsh` command; raises what it raises."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and (not isinstance(done.exception, SystemExit) or done.exit_code == 2):
        raise done.exception


def _lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _sample(kind: type[events.Event], chosen: dict[str, object]) -> dict[str, object]:
    """An event of a kind, with a value of its type in every field."""
    values: dict[str, object] = {"dict[str": {"a": 1}, "'push'": "push"}  # before what stands in them
    values |= {"tuple[tuple": ((1, 2),), "tuple[str": ("a",), "tuple": (1, 2), "Phase": "forward", "Status": "open"}
    values |= {"float": 0.5, "int": 3, "bool": True, "str": "joined"}
    found = {
        field.name: chosen.get(field.name, next(one for text, one in values.items() if text in str(field.type)))
        for field in dataclasses.fields(kind)
    }
    return events.to_record(kind(**found))


def make_events(folder: Path) -> None:
    """The events of two ranks and a launcher, incidents, and a log of faults."""
    folder.mkdir(parents=True)
    for rank in range(2):
        records: list[dict[str, object]] = []
        for step in range(1, 9):
            at = 1000.0 + step
            chosen = {"time": at, "rank": rank, "step": step, "sequence": step, "start_s": at - 0.5, "duration_s": 0.2}
            records += [_sample(kind, chosen) for kind in events.event_types().values()]
        _lines(folder / f"rank-{rank}.jsonl", records)
    ended: dict[str, object] = {"time": 1010.0, "rank": -1, "type": "membership", "action": "ended", "world_size": 2}
    _lines(folder / "launcher-77.jsonl", [ended])
    incident: dict[str, object] = {
        "time": 1004.0,
        "rank": 0,
        "type": "incident",
        "incident": "a",
        "failure": "divergence",
        "status": "open",
        "action": "roll back",
        "step": 4,
        "detail": None,
        "duration_s": None,
    }
    _lines(folder / "incidents.jsonl", [incident, {**incident, "status": "resolved", "duration_s": 1.0}])
    fault = {"time": 1.0, "rank": 0, "pid": 7, "kind": "fault", "step": 1, "fault": "kill rank 0 at step 1"}
    _lines(folder / "faults.log", [{**fault, "kind": "step"}, fault, {**fault, "kind": "step", "time": 2.0, "step": 2}])


def forge_events(folder: Path, draw: random.Random, private: Path) -> None:
    """Change some lines of one file, or its bytes."""
    target = draw.choice(sorted(path for path in folder.iterdir() if path.is_file()))
    if draw.random() < 0.2:
        target.write_bytes(damaged_bytes(target.read_bytes(), draw))
        return
    lines = target.read_text().splitlines()
    for _ in range(draw.choice([1, 3, 10])):
        at = draw.randrange(len(lines))
        try:
            lines[at] = json.dumps(mutated(json.loads(lines[at]), draw, private))
        except (ValueError, RecursionError):
            continue
    target.write_text("\n".join(lines) + "\n", errors="replace")


def read_events(folder: Path) -> Iterator[Callable[[], object]]:
    """Every command that reads them."""
    yield lambda: command("incidents", folder)
    yield lambda: command("incidents", folder, "--json")
    yield lambda: command("trace", "merge", folder)
    yield lambda: command("trace", "summary", folder)
    yield lambda: command("why", folder)
    yield lambda: command("forecast", folder)
    yield lambda: command("compare", folder, folder)
    yield lambda: command("dashboard", folder, "--report", folder / "report.html")
    yield lambda: fault_outcomes(read_fault_log(folder / "faults.log"))


def make_plans(folder: Path) -> None:
    """A plan in each format, and a file of rules for alerts."""
    folder.mkdir(parents=True)
    values = Plan().model_dump(mode="json")
    (folder / "plan.json").write_text(json.dumps(values))
    Plan().save(folder / "plan.toml")
    Plan().save(folder / "plan.yaml")
    rule = '[[rule]]\nname = "slow"\nmetric = "torsh_step_seconds"\nvalue = 3\nactions = ["log"]\n'
    (folder / "rules.toml").write_text(rule)


def forge_plans(folder: Path, draw: random.Random, private: Path) -> None:
    """Change every file."""
    for path in sorted(folder.iterdir()):
        text = path.read_text()
        if path.suffix == ".json" and draw.random() < 0.7:
            path.write_text(json.dumps(mutated(json.loads(text), draw, private)))
        elif draw.random() < 0.5:
            path.write_bytes(damaged_bytes(text.encode(), draw))
        else:
            words = text.split("\n")
            at = draw.randrange(len(words))
            key = words[at].partition("=")[0] or "x "
            value = evil_value(draw, private)
            words[at] = f"{key}= {json.dumps(value) if draw.random() < 0.7 else value}"
            path.write_text("\n".join(words), errors="replace")


def read_plans(folder: Path) -> Iterator[Callable[[], object]]:
    """Load each."""
    for name in ("plan.json", "plan.toml", "plan.yaml"):
        yield lambda name=name: Plan.load(folder / name)  # type: ignore[misc]
        yield lambda name=name: command("plan", "validate", folder / name)  # type: ignore[misc]
    yield lambda: read_rules(folder / "rules.toml")


def make_machine(folder: Path) -> None:
    """What is remembered of a job, what its ranks reported, and the hosts of other launchers."""
    job = folder / "jobs" / "one"
    (job / "reports").mkdir(parents=True)
    record = {
        "name": "one",
        "engine": "local",
        "job_id": "one",
        "submitted_at_s": 1000.0,
        "nodes": 1,
        "workers": 2,
        "command": "train.py",
        "directory": "/tmp",
        "options": {"a": "b"},
    }
    (job / "job.json").write_text(json.dumps(record))
    (job / "process.json").write_text(json.dumps({"pid": 7, "start_ticks": 3, "boot": "b", "host": "h"}))
    (job / "exit.json").write_text(json.dumps({"exit_code": 1, "reason": "r"}))
    report = {"rank": 0, "host": "h", "kind": "ValueError", "message": "m", "traceback": ["a"], "at_s": 1.0}
    for rank in range(2):
        (job / "reports" / f"rank-{rank}.json").write_text(json.dumps({**report, "rank": rank}))
    (folder / "hosts").write_text("node1 slots=4\nnode2 slots=4\n")
    (folder / "horovod.yaml").write_text("num-proc: 2\nlogging:\n  level: INFO\n")
    run = {"arguments": ["--nproc-per-node", "2", "train.py"], "directory": "/tmp", "variables": {"A": "b"}}
    (folder / "run.json").write_text(json.dumps(run))


def forge_machine(folder: Path, draw: random.Random, private: Path) -> None:
    """Change every file."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix == ".json" and draw.random() < 0.7:
            path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw, private)))
        else:
            path.write_bytes(damaged_bytes(path.read_bytes(), draw))


def read_machine(folder: Path) -> Iterator[Callable[[], object]]:
    """Read each."""
    os.environ["TORSH_STATE_DIR"] = str(folder)
    yield all_records
    yield lambda: command("jobs")
    yield lambda: background_status("one")
    yield lambda: first_failure(folder / "jobs" / "one" / "reports")
    yield lambda: read_resources(str(folder / "hosts"))
    yield lambda: read_hostfile(str(folder / "hosts"))
    yield lambda: config_flags(str(folder / "horovod.yaml"), {"--num-proc": 1, "--log-level": 1})
    yield lambda: _recorded(folder)
