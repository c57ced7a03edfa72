"""Scripts are read, not run: every distributed call with its counterpart, under whatever name it was imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.script_check import check_script, proposed_change

SCRIPT = """\
from __future__ import annotations
import os
import torch, torch.distributed as dist
import horovod.torch as hvd
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

raise SystemExit("never run")
dist.init_process_group("nccl", init_method="env://")
model = DDP(torch.nn.Linear(2, 2), device_ids=[0])
print(dist.get_rank(), "é", dist.get_world_size())
torch.distributed.all_reduce(model.weight)
dist.monitored_barrier()
sampler = DistributedSampler(range(4))
hvd.allreduce(model.weight)
os.environ.get("RANK")
dist.get_rank(group)
"""


def test_every_call_is_listed_with_what_to_write() -> None:
    found = {(one.line, one.call): one for one in check_script(SCRIPT)}
    assert found[9, "torch.distributed.init_process_group"].counterpart == "td.init()"
    assert found[10, "torch.nn.parallel.DistributedDataParallel"].counterpart.startswith("td.DistributedDataParallel")
    assert found[12, "torch.distributed.all_reduce"].counterpart == "td.all_reduce(tensor)"
    assert found[13, "torch.distributed.monitored_barrier"].counterpart == ""
    assert found[14, "torch.utils.data.distributed.DistributedSampler"].counterpart
    assert "--as horovod" in found[15, "horovod.torch.allreduce"].note
    assert len(found) == 9


def test_the_change_rewrites_what_has_the_same_meaning_and_nothing_else() -> None:
    change = proposed_change(SCRIPT)
    added = [line[1:] for line in change.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == ["import torsh_distributed as td", "td.init()", 'print(td.rank(), "é", td.world_size())']
    assert proposed_change("print(1)\n") == ""
    with pytest.raises(InvalidArgument, match="not Python"):
        check_script("def (")


def test_the_command_lists_and_proposes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "migrate", "check", str(script)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert f"{script}:9: torch.distributed.init_process_group → td.init()" in done.stdout
    assert "+td.init()" in subprocess.run([*line, "--diff"], capture_output=True, text=True, timeout=100).stdout
    missing = subprocess.run([*line[:-1], "none.py"], capture_output=True, text=True, timeout=100)
    assert missing.returncode == 1
    assert "cannot be read" in missing.stderr
