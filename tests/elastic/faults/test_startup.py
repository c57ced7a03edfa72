"""Faults from the environment, under `torsh run` and under torchrun, in scripts that know nothing of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.elastic.faults.fault_log import fault_outcomes, read_fault_log

PLAIN = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("loss", float(model(torch.ones(2, 4)).sum()), flush=True)
dist.destroy_process_group()
"""

ENGINE = """
import functools, sys
import torch
import torsh_distributed as td
td.init()
torch.manual_seed(0)
plan = td.Plan.from_dict({
    "training": {"steps": 6, "exactly_once": True},
    "checkpoint": {"enabled": True, "dir": sys.argv[1], "every_steps": 2},
    "distributed": {"deterministic": True},
})
engine = td.parallelize(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)),
    functools.partial(torch.optim.AdamW, lr=0.1), plan, loss_fn=torch.nn.functional.mse_loss,
)
engine.resume()
generator = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator))
for batch in engine.batches(torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)):
    engine.step(batch)
engine.checkpoints.close()
print("weights", [param.double().sum().item().hex() for param in engine.unwrapped.parameters()], flush=True)
td.destroy_process_group()
"""


def chaos(
    script: Path, *options: str, args: tuple[str, ...] = (), timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "from torsh_distributed.cli.entry_point import main; main()",
            "chaos",
            "--json",
            *options,
            str(script),
            *args,
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def report(done: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, object]]]:
    lines = [line for line in done.stderr.splitlines() if line.startswith('{"faults"')]
    assert lines, done.stderr[-3000:]
    found: dict[str, list[dict[str, object]]] = json.loads(lines[-1])
    return found


@pytest.mark.matrix
@pytest.mark.ranks
@pytest.mark.slow
def test_an_engine_is_killed_twice_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENGINE)
    events = tmp_path / "events"
    options = ["--nproc-per-node", "2", "--max-restarts", "2"]
    faults = ["--fault", "kill rank 1 at step 3 in backward", "--fault", "segfault rank 0 at step 4 of attempt 1"]
    os.environ["TORSH_EVENTS_DIR"] = str(events)
    try:
        hit = chaos(script, *faults, *options, args=(str(tmp_path / "hit"),))
    finally:
        del os.environ["TORSH_EVENTS_DIR"]
    assert hit.returncode == 0, hit.stderr[-3000:]
    found = report(hit)
    assert found["not_reached"] == []
    assert [one["fault"] for one in found["faults"]] == [faults[1], faults[3]]
    assert all(one["caught_up_s"] is not None for one in found["faults"])
    calm = subprocess.run(
        [sys.executable, "-m", "torsh_distributed.run", *options, str(script), str(tmp_path / "calm")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    weights = [
        {line.split("weights ")[1] for line in run.stdout.splitlines() if "weights " in line} for run in (hit, calm)
    ]
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]


@pytest.mark.ranks
@pytest.mark.matrix
def test_a_plain_script_under_torchrun_is_hit_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    for launcher, options in (
        ("torchrun", ["--standalone", "--nproc-per-node", "2"]),
        ("torsh", ["--nproc-per-node", "2"]),
    ):
        log = tmp_path / launcher
        faults = [
            "--fault",
            "delay rank 0 at step 1 in forward for 0.1 s",
            "--fault",
            "raise rank 1 at step 4 in optimizer",
        ]
        done = chaos(script, "--launcher", launcher, "--log", str(log), *faults, *options)
        assert done.returncode != 0
        outcomes = fault_outcomes(read_fault_log(log))
        assert [str(one.fault).split(" at ")[0] for one in outcomes] == ["delay rank 0", "raise rank 1"]
        assert outcomes[0].next_step_s is not None
        # The other rank may still finish the step, whose gradients it has; nobody gets further.
        assert outcomes[1].replaced_s is None
        assert "loss" not in done.stdout
        assert "InjectedFault: raise rank 1 at step 4 in optimizer" in done.stderr + done.stdout


def test_the_log_says_when_training_went_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    steps = [(1.0, 10, 0), (2.0, 10, 1), (2.0, 11, 1), (9.0, 20, 0), (10.0, 20, 1), (11.0, 20, 2)]
    records = [{"time": at, "rank": pid % 10, "pid": pid, "kind": "step", "step": step} for at, pid, step in steps]
    records.append({"time": 2.5, "rank": 1, "pid": 11, "kind": "fault", "step": 1, "fault": "kill rank 1 at step 1"})
    log.write_text("\n".join(map(json.dumps, records)) + '\n{"time": 12.')
    (outcome,) = fault_outcomes(read_fault_log(log))
    assert outcome.next_step_s == pytest.approx(7.5)
    assert outcome.caught_up_s == pytest.approx(8.5)
