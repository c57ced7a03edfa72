"""Lines of other launchers as lines of `torsh run`: the same ranks, and a plan where the line says how to train."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.launchers.launch_command import translate_command
from torsh_distributed.migrate.report import Verdict


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "torchrun --nproc_per_node=4 --nnodes 2 --rdzv_backend c10d --rdzv-endpoint node1:29500 train.py --lr 1",
            "torsh run --nproc-per-node 4 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29500 train.py --lr 1",
        ),
        ("python -m torch.distributed.launch --use_env -m pkg.train", "torsh run --module pkg.train"),
        ("torchrun --standalone --nnodes=1:4 train.py", "torsh run --standalone --nnodes 4 --elastic train.py"),
        (
            "mpirun -np 4 -x LR=2 -x PATH --bind-to none python train.py a",
            "LR=2 torsh run --nproc-per-node 4 train.py a",
        ),
        (
            "mpiexec -n 8 -H n1:4,n2:4 -genv THREADS 2 python -m train",
            "THREADS=2 torsh run --nproc-per-node 4 --nnodes 2 --node-rank $NODE_RANK --master-addr n1 --module train",
        ),
        ("A=1 horovodrun -np 2 python train.py", "A=1 torsh run --as horovod -np 2 python train.py"),
        ("deepspeed --num_gpus 2 train.py --deepspeed", "torsh run --as deepspeed --num_gpus 2 train.py --deepspeed"),
        (
            "accelerate launch --num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip n1 t.py --x",
            "torsh run --nproc-per-node 2 --nnodes 2 --node-rank 1 --master-addr n1 --plan plan.toml t.py --x",
        ),
    ],
)
def test_the_same_job_under_torsh_run(line: str, wanted: str) -> None:
    assert translate_command(shlex.split(line)).text() == wanted


def test_accelerate_options_become_a_plan_over_the_file(tmp_path: Path) -> None:
    config = tmp_path / "default_config.yaml"
    config.write_text(
        "distributed_type: FSDP\nmixed_precision: 'no'\nnum_processes: 2\nfsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\n"
    )
    line = f"accelerate launch --config_file={config} --mixed_precision fp16 --fsdp_sharding_strategy 2 train.py"
    found = translate_command(shlex.split(line))
    assert found.plan is not None
    assert found.plan.precision.dtype == "fp16"
    assert found.plan.fsdp.strategy == "shard_grad_op"
    assert found.plan.mesh.shard == -1


def test_what_is_not_known_is_named() -> None:
    with pytest.raises(InvalidArgument, match="no option --nproc-pernode") as caught:
        translate_command(["torchrun", "--nproc-pernode", "2", "train.py"])
    assert "nproc-per-node" in str(caught.value.hint)
    with pytest.raises(InvalidArgument, match="not a launcher"):
        translate_command(["bash", "train.sh"])
    with pytest.raises(InvalidArgument, match="no script"):
        translate_command(["torchrun", "--nproc-per-node", "2"])
    with pytest.raises(InvalidArgument, match="no option --mixed_precison"):
        translate_command(["accelerate", "launch", "--mixed_precison", "fp16", "train.py"])
    report = translate_command(["torchrun", "--numa-binding", "node", "train.py"]).report
    assert report["--numa-binding"].verdict is Verdict.REFUSED


@pytest.mark.ranks
def test_the_command_prints_the_line_and_writes_the_plan(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    entry = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "migrate"]
    line = shlex.split("accelerate launch --use_fsdp --num_processes 2 --mixed_precision bf16 train.py")
    done = subprocess.run(
        [*entry, "command", "-o", str(plan), "--", *line], capture_output=True, text=True, timeout=100
    )
    assert done.stdout == f"torsh run --nproc-per-node 2 --plan {plan} train.py\n", done.stderr
    assert 'dtype = "bf16"' in plan.read_text()
    done = subprocess.run(
        [*entry, "command", "--", "torchrun", "--numa-binding", "node", "t.py"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "numactl" in done.stderr
