"""Scripts are read, not run: every distributed call with its counterpart, under whatever name it was imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.scripts.script_changes import proposed_change
from torsh_distributed.migrate.scripts.script_check import check_script

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
    assert added == [
        "import torsh_distributed as td",
        "td.init()",
        "model = td.DistributedDataParallel(torch.nn.Linear(2, 2))",
        'print(td.rank(), "é", td.world_size())',
    ]
    assert proposed_change("print(1)\n") == ""
    with pytest.raises(InvalidArgument, match="not Python"):
        check_script("def (")


OTHERS = """\
\"\"\"Trains.\"\"\"
from accelerate import Accelerator
import deepspeed
import lightning.pytorch as pl
from fairscale.nn import FullyShardedDataParallel as FSDP
from fairscale.nn.model_parallel.random import get_cuda_rng_tracker
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

accelerator = Accelerator(mixed_precision="fp16")
model = accelerator.prepare(model)
engine, optimizer, _, _ = deepspeed.initialize(model=model)
engine.backward(loss)
trainer = pl.Trainer(strategy="ddp")
trainer.fit(model)
FSDP(model)
get_cuda_rng_tracker()
sharded = FullyShardedDataParallel(
    model,
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    cpu_offload=CPUOffload(offload_params=True),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    ignored_modules=find_them(),
)
replicas = DistributedDataParallel(
    model,
    device_ids=[rank],
    bucket_cap_mb=2 * size,
    process_group=group,
)
with replicas.no_sync():
    pass
replicas.register_comm_hook(None, hook)
replicas.parameters()
DistributedDataParallel(model, delay_all_reduce_named_params=names)
"""


def test_calls_of_other_libraries_and_methods_of_what_they_return() -> None:
    found = {(one.line, one.call): one for one in check_script(OTHERS)}
    assert found[10, "accelerate.Accelerator"].counterpart == "td.init() before it"
    assert found[11, "accelerate.Accelerator.prepare"].note == "stays"
    assert "--as deepspeed" in found[12, "deepspeed.initialize"].note
    assert "--as deepspeed" in found[13, "deepspeed.initialize.backward"].note
    assert "TorshStrategy" in found[14, "lightning.pytorch.Trainer"].counterpart
    assert "--as fairscale" in found[16, "fairscale.nn.FullyShardedDataParallel"].note
    assert "seed ranks" in found[17, "fairscale.nn.model_parallel.random.get_cuda_rng_tracker"].note
    assert "compression" in found[33, "torch.nn.parallel.DistributedDataParallel.register_comm_hook"].counterpart
    assert len(found) == 15
    verdicts = {entry.key: entry for entry in found[18, "torch.distributed.fsdp.FullyShardedDataParallel"].keywords}
    assert verdicts["sharding_strategy"].means == "fsdp.strategy = shard_grad_op"
    assert verdicts["cpu_offload"].means == "offload.params = true"
    assert verdicts["mixed_precision.param_dtype"].means == "precision.dtype = bf16"
    assert verdicts["ignored_modules"].value == "find_them()"


def test_settings_are_carried_over_and_groups_are_started_first() -> None:
    change = proposed_change(OTHERS)
    added = [line[1:] for line in change.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added == [
        "import torsh_distributed as td",
        "td.init()",
        "replicas = td.DistributedDataParallel(model, td.DdpConfig(max_bucket_size_mb=2 * size), group=group)",
    ]


@pytest.mark.ranks
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
