"""Hugging Face's Trainer and Accelerate run on the stand-in as they run on DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bed.world import World

pytestmark = [pytest.mark.needs_library("transformers"), pytest.mark.needs_library("accelerate")]

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "reduce_bucket_size": "auto"},
    "zero_allow_untested_optimizer": True,
}


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def _samples() -> list[dict[str, Any]]:
    import torch

    tokens = torch.randint(0, 64, (64, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _trained(folder: str, config: dict[str, Any] | None, batch: int, *, resumes: bool = False) -> Any:
    """Losses of a Trainer; with `config` on the stand-in. Runs on every rank."""
    if config is not None:
        from torsh_distributed.migrate.stand_in import install

        install("deepspeed")
    import torch
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    torch.manual_seed(0)
    trainer = Trainer(model=_model(), args=args, train_dataset=_samples())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes else None)
    if config is None or trainer.model_wrapped is None:
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(f"{folder}/end")
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "engine": type(trainer.model_wrapped).__name__,
        "module": type(trainer.model_wrapped).__module__,
        "sharded": any(hasattr(param, "to_local") for param in trainer.model.parameters()),
    }


@pytest.mark.matrix
def test_the_trainer_trains_with_zero_3_as_without_it(world: World, tmp_path: Path) -> None:
    (plain,) = world.run(_trained, str(tmp_path / "plain"), None, 4, num_ranks=1, backend=None, timeout_s=110)
    folder = tmp_path / "zero3"
    found = world.run(_trained, str(folder), CONFIG, 2, num_ranks=2, backend=None, timeout_s=110)
    for rank in found:
        assert rank["engine"] == "DeepSpeedEngine"
        assert rank["module"].startswith("torsh_distributed")
        assert rank["sharded"]
        assert rank["losses"] == pytest.approx(plain, rel=2e-4)
    assert (folder / "end" / "model.safetensors").is_file()
    assert (folder / "checkpoint-2" / "latest").read_text() == "global_step2"


@pytest.mark.matrix
def test_the_trainer_resumes_from_a_checkpoint_of_zero_3(world: World, tmp_path: Path) -> None:
    first = world.run(_trained, str(tmp_path), CONFIG, 2, num_ranks=2, backend=None, timeout_s=110)
    again = world.run(_resumed, str(tmp_path), CONFIG, 2, num_ranks=2, backend=None, timeout_s=110)
    assert again[0]["losses"][-2:] == pytest.approx(first[0]["losses"][-2:], rel=1e-4)


def _resumed(folder: str, config: dict[str, Any], batch: int) -> Any:
    return _trained(folder, config, batch, resumes=True)


def _accelerated(stage: int, dtype: str) -> Any:
    from torsh_distributed.migrate.stand_in import install

    install("deepspeed")
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    # On a machine without GPUs Accelerate joins its ranks only if it is told to use the CPU, as the Trainer tells it.
    PartialState(cpu=True)
    plugin = DeepSpeedPlugin(
        zero_stage=stage, gradient_accumulation_steps=2, gradient_clipping=1.0, zero3_save_16bit_model=True
    )
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=dtype, gradient_accumulation_steps=2)
    set_seed(0)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(_samples(), batch_size=4, shuffle=False)  # type: ignore[arg-type]  # a list is a dataset
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).float().mean().item())
    state = accelerator.get_state_dict(model)
    shapes = None if state is None else {name: tuple(value.shape) for name, value in state.items()}
    return losses, model.global_steps, shapes, accelerator.is_main_process


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "dtype"), [(0, "no"), (2, "bf16"), (3, "bf16")])
def test_accelerate_trains_through_its_plugin(world: World, stage: int, dtype: str) -> None:
    found = world.run(_accelerated, stage, dtype, num_ranks=2, backend=None, timeout_s=110)
    for losses, num_steps, shapes, is_main in found:
        assert losses[-1] < losses[0] - 0.05
        assert num_steps == len(losses) // 2
        if is_main:
            assert shapes["model.embed_tokens.weight"] == (64, 32)
