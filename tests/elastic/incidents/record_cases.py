"""Records runs that end well or badly, for the test of the risk score.

Run `python -m tests.elastic.incidents.record_cases`.

Every case is a real job of two ranks; what is kept are the steps and the memory of its ranks, as they were emitted, and
what is known of the run: which rank failed, when, and of what.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RECORDINGS = Path(__file__).parent / "recordings"

SCRIPT = """\
import functools, json, random, resource, sys, time
import torch
import torsh_distributed as td
from torsh_distributed.launch.worker.recording.memory_samples import MemorySamples

folder, kind, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
td.init(backend="gloo")
is_victim = td.rank() == number % 2
sink, samples = td.events.JsonlSink(folder), MemorySamples(interval_s=0.15)
source = random.Random(number)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
engine = td.parallelize(model, functools.partial(torch.optim.SGD, lr=0.01), loss_fn=torch.nn.functional.mse_loss)
kept, slower_s = [], 0.0
if kind == "leak" and is_victim:
    used = int(open("/proc/self/statm").read().split()[5]) * 4096
    resource.setrlimit(resource.RLIMIT_DATA, (used + (120 << 20), resource.RLIM_INFINITY))
try:
    while engine.num_steps < 260:
        x = torch.randn(32, 64)
        time.sleep(0.01 + source.random() * 0.005 + (slower_s if is_victim else 0.0))
        if source.random() < 0.02:
            time.sleep(0.05)  # a hiccup, as every machine has
        if kind == "noisy" and engine.num_steps % 40 < 8:
            kept = [torch.ones(1 << 20) for _ in range(source.randrange(8))]  # comes and goes
        if kind == "leak" and is_victim and engine.num_steps > 30:
            kept.append(torch.ones((2 + number) << 17))
        if kind == "slowing" and is_victim and engine.num_steps > 60:
            slower_s += 0.0002 * (1 + number % 3)
        engine.step((x, x.sum(1, keepdim=True)))
except (RuntimeError, MemoryError) as error:
    sink.close()
    open(f"{folder}/failed-{td.rank()}", "w").write(json.dumps({"at": time.time(), "why": str(error)[:200]}))
    raise
sink.close()
td.destroy_process_group()
"""


def record(kind: str, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        command = [sys.executable, "-m", "torsh_distributed.run", "--nproc-per-node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(script), folder, kind, str(number)], capture_output=True, text=True, timeout=120, env=env
        )
        failed = {path.name[-1]: json.loads(path.read_text()) for path in Path(folder).glob("failed-*")}
        victim = number % 2
        label = {"kind": kind, "victim": victim if kind in ("leak", "slowing") else None, "exit_code": done.returncode}
        if kind == "leak":
            assert done.returncode != 0
            assert str(victim) in failed, done.stderr[-2000:]
            label |= {"failed_at": failed[str(victim)]["at"], "error": failed[str(victim)]["why"]}
        else:
            assert done.returncode == 0, done.stderr[-2000:]
        lines = [json.dumps(label)]
        for path in sorted(Path(folder).glob("rank-*.jsonl")):
            for line in path.read_text().splitlines():
                event = json.loads(line)
                if event["type"] in ("step", "memory"):
                    lines.append(json.dumps({key: value for key, value in event.items() if value is not None}))
        RECORDINGS.mkdir(exist_ok=True)
        (RECORDINGS / f"{kind}-{number}.jsonl").write_text("\n".join(lines) + "\n")
        print(kind, number, len(lines), label, flush=True)


if __name__ == "__main__":
    for case_number in range(6):
        for case_kind in ("healthy", "noisy", "leak", "slowing"):
            record(case_kind, case_number)
