"""Scripts in the styles that other projects' documentation and repositories teach run unchanged, on two ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.matrix, pytest.mark.ranks]

STYLES = Path(__file__).parent / "styles"
TRAINER: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO_3 = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": True},
    "offload_param": {"device": "cpu", "pin_memory": True},
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}


def run(library: str, *words: str) -> str:
    """What the job prints; it must succeed."""
    torsh = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "run", "--as", library]
    done = subprocess.run([*torsh, *words], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.needs_library("transformers")
@pytest.mark.parametrize(("stage", "lora"), [(2, False), (3, False), (3, True)])
def test_a_trainer_with_a_config_file(tmp_path: Path, stage: int, lora: bool) -> None:
    config = TRAINER if stage == 2 else {**TRAINER, "zero_optimization": ZERO_3}
    words = ["--num_gpus", "2", str(STYLES / "hf_trainer.py"), "--deepspeed", written(tmp_path, config)]
    words += ["--output_dir", str(tmp_path / "out"), "--max_steps", "6", "--per_device_train_batch_size", "4"]
    words += ["--gradient_accumulation_steps", "2", "--learning_rate", "3e-3", "--warmup_steps", "3", "--bf16", "True"]
    words += ["--logging_steps", "1", "--save_steps", "3", "--report_to", "none", "--use_cpu", "True"]
    said = run("deepspeed", *words, *(["--lora", "True"] if lora else []))
    trained = 8 if lora else 21
    assert re.search(rf"zero3 {stage == 3}, {trained} trained tensors, .* to 3.00e-03, 6 steps", said), said


@pytest.mark.needs_library("accelerate")
def test_accelerate_with_dummies_for_what_the_file_has(tmp_path: Path) -> None:
    words = ["--nproc-per-node", "2", str(STYLES / "accelerate_dummies.py")]
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    said = run("deepspeed", *words, "--config", written(tmp_path, {**TRAINER, "optimizer": optimizer}))
    assert "48 steps" in said, said


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_gpt_with_a_parser_of_megatrons_kind_saves_and_goes_on(tmp_path: Path, dtype: str) -> None:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "prescale_gradients": True,
        "wall_clock_breakdown": True,
        dtype: {"enabled": True},
    }
    if dtype == "fp16":
        # A scale that does not overflow here: a skipped step does not step the schedule.
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 2}
    words = ["--num_gpus", "2", str(STYLES / "megatron_args.py"), "--deepspeed", "--deepspeed_config"]
    words += [written(tmp_path, config), "--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    first = run("deepspeed", *words, "--save", str(tmp_path / "ckpt"))
    losses = [float(one) for one in re.findall(r"lm loss ([\d.]+)", first)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    again = run("deepspeed", *words, "--load", str(tmp_path / "ckpt"), "--train-iters", "8")
    assert "loaded iteration 6" in again
    last = float(re.findall(r"iteration 6 \| lr ([\d.]+)", first)[0])
    rates = [float(rate) for rate in re.findall(r"iteration [78] \| lr ([\d.]+)", again)]
    assert rates == pytest.approx([0.01 / (0.01 / last + 0.1), 0.01 / (0.01 / last + 0.2)], abs=2e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_saved_parameter_by_parameter(tmp_path: Path, stage: int) -> None:
    words = [
        "--num_gpus",
        "2",
        str(STYLES / "rlhf_saving.py"),
        "--output_dir",
        str(tmp_path),
        "--zero_stage",
        str(stage),
    ]
    assert "saved 5 tensors" in run("deepspeed", *words)


def test_an_imagenet_script_warms_up_and_resumes(tmp_path: Path) -> None:
    words = [
        "-np",
        "2",
        "python",
        str(STYLES / "horovod_imagenet.py"),
        "--checkpoint-format",
        str(tmp_path / "{epoch}.pt"),
    ]
    first = run("horovod", *words, "--epochs", "2", "--fp16-allreduce", "--gradient-predivide-factor", "2.0")
    assert len(re.findall(r"epoch \d: .* from 0", first)) == 2
    again = run("horovod", *words)
    assert re.findall(r"epoch (\d): .* from 2", again) == ["3", "4"]
    assert float(re.findall(r"accuracy ([\d.]+)%", again)[-1]) > 90, again
