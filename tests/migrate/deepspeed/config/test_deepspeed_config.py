"""DeepSpeed configs as plans: every key has a verdict, and what the verdicts say is in the plan."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.migrate.deepspeed import DeepSpeedConfig, from_deepspeed
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import AUTO, Setting, SettingGroup, leaves_of
from torsh_distributed.migrate.report import MigrationReport, Verdict
from torsh_distributed.plan import Plan

SAMPLES = Path(__file__).parent / "samples"
TRAINER = {
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 3e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.total_num_steps": 1000,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 3e-5,
    "scheduler.params.warmup_num_steps": 100,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
}


def translated(world_size: int | None = 2, **keys: Any) -> tuple[Plan, MigrationReport]:
    return from_deepspeed({"train_batch_size": 16, **keys}, world_size=world_size)


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


# --- files -------------------------------------------------------------------------------------------------------


def test_a_first_example_becomes_a_plan_of_replicas() -> None:
    plan, report = from_deepspeed(SAMPLES / "first_steps.json", world_size=4)
    assert not report.refused
    assert (plan.mesh.dp, plan.mesh.shard) == (-1, 1)
    assert plan.precision.dtype == "bf16"
    assert plan.training.batch_size == 16
    assert plan.training.gradient_clipping == 1.0
    assert plan.training.log_every == 2000
    assert plan.training.learning_rate == 0.001
    assert report["fp16.loss_scale_window"].reason.startswith("off")


def test_a_file_for_a_trainer_takes_its_values_from_fills() -> None:
    plan, report = from_deepspeed(SAMPLES / "trainer_zero3.json", world_size=2, fills=TRAINER)
    assert not report.refused
    assert plan.fsdp.strategy == "full_shard"
    assert plan.offload.enabled
    assert (plan.offload.params, plan.offload.grads, plan.offload.optimizer_state) == (False, False, True)
    assert plan.precision.dtype == "bf16"
    assert plan.training.gradient_accumulation == 4
    assert report["zero_optimization.reduce_bucket_size"].verdict is Verdict.HINT
    assert "weight_decay=0.1" in report["optimizer.type"].means


def test_auto_without_a_trainer_is_one_message_with_every_key() -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_deepspeed(SAMPLES / "trainer_zero3.json", world_size=2)
    for key in TRAINER:
        assert f'{key} is "auto"' in caught.value.message
    assert "per_device_train_batch_size" in caught.value.message
    assert "reduce_bucket_size" not in caught.value.message


def test_a_fill_for_what_is_not_auto_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='gradient_clipping, which is not "auto"'):
        from_deepspeed({"train_batch_size": 4}, fills={"gradient_clipping": 1.0})


@pytest.mark.needs_library("hjson")
def test_a_pretraining_file_with_comments_keeps_its_curriculum() -> None:
    plan, report = from_deepspeed(SAMPLES / "pipeline_pretraining.hjson", world_size=8)
    assert not report.refused
    assert plan.fsdp.strategy == "shard_optimizer"
    assert plan.training.gradient_accumulation == 16
    assert plan.precision.init_loss_scale == 2048
    assert plan.precision.loss_scale_growth_interval == 500
    assert "CurriculumSchedule" in report["curriculum_learning.schedule_config"].means
    assert report["data_efficiency.data_sampling.dynamic_batching.enabled"].verdict is Verdict.HONOURED


def test_an_rlhf_file_is_refused_for_its_hybrid_engine_alone() -> None:
    plan, report = from_deepspeed(SAMPLES / "rlhf_actor.json", world_size=4)
    assert [entry.key for entry in report.refused] == ["hybrid_engine.enabled"]
    assert plan.observe.exports == ("tensorboard:step3_tensorboard/step3_actor",)
    assert plan.fsdp.strategy == "shard_grad_op"
    with pytest.raises(ConfigurationError, match=r"hybrid_engine.enabled = true: generation"):
        report.require_accepted()


@pytest.mark.parametrize("sample", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_every_key_of_a_file_has_one_line(sample: Path) -> None:
    config = DeepSpeedConfig(sample, fills=TRAINER if "trainer" in sample.name else None)
    _, report = config.to_plan(world_size=2)
    given = [key for key, _ in leaves_of(config.values, KNOWN)]
    assert [entry.key for entry in report if "(not given)" not in entry.key] == given


def test_a_config_may_be_base64_and_a_dict_is_not_changed() -> None:
    values = {"train_batch_size": 4, "zero_optimization": True}
    text = base64.urlsafe_b64encode(json.dumps(values).encode()).decode()
    assert from_deepspeed(text)[0] == from_deepspeed(values)[0]
    assert values == {"train_batch_size": 4, "zero_optimization": True}
    with pytest.raises(ConfigurationError, match="there is no DeepSpeed config nowhere"):
        from_deepspeed("nowhere.json")


def test_plan_has_it_too() -> None:
    plan, report = Plan.from_deepspeed({"train_batch_size": 4, **zero(stage=2)})
    assert plan.fsdp.strategy == "shard_grad_op"
    assert report["zero_optimization.stage"].verdict is Verdict.HONOURED


# --- every key ---------------------------------------------------------------------------------------------------


def _sample(setting: Setting) -> Any:
    if setting.kind == "flag":
        return not setting.default
    if setting.choices:
        return setting.choices[-1]
    if setting.kind == "any":
        return "something"
    return {"whole": int(setting.least or 0) + 2, "number": 0.5, "text": "word", "words": ["word"]}[setting.kind]


def _all_keys(group: SettingGroup, prefix: str = "") -> Iterator[tuple[str, Setting]]:
    for name, setting in group.settings.items():
        if isinstance(setting, SettingGroup):
            yield from _all_keys(setting, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", setting


def _config_with(key: str, value: Any) -> dict[str, Any]:
    """A config in which this key matters: the sections around it are on."""
    config: dict[str, Any] = {"train_batch_size": 32}
    place, group = config, KNOWN
    *sections, name = key.split(".")
    for section in sections:
        place = place.setdefault(section, {})
        inner = group.settings[section]
        assert isinstance(inner, SettingGroup)
        group = inner
        if group.gate is not None:
            place[group.gate] = True
    place[name] = value
    return config


EXTRA: dict[str, dict[str, Any]] = {
    "optimizer.legacy_fusion": {"optimizer": {"type": "AdamW"}},
    "scheduler.type": {"scheduler": {"type": "WarmupLR"}},
    "optimizer.type": {"optimizer": {"type": "SGD"}},
    "elasticity.": {"elasticity": {"max_train_batch_size": 32, "micro_batch_sizes": [1, 2], "max_gpus": 64}},
    "curriculum_learning.": {
        "curriculum_learning": {"schedule_type": "custom", "min_difficulty": 1, "max_difficulty": 2}
    },
    "data_efficiency.data_sampling.curriculum_learning": {
        "data_efficiency": {"data_sampling": {"curriculum_learning": {"curriculum_metrics": {}}}}
    },
    "zero_optimization.offload_optimizer.": zero(stage=3),
    "zero_optimization.offload_param.": zero(stage=3),
}
VALUES: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "pipeline.stages": 2,
    "sequence_parallel_size": 2,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
}


def _merge(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    merged = {**base}
    for name, value in more.items():
        merged[name] = _merge(base.get(name, {}), value) if isinstance(value, dict) else value
    return merged


@pytest.mark.parametrize(("key", "setting"), list(_all_keys(KNOWN)), ids=[key for key, _ in _all_keys(KNOWN)])
def test_no_key_is_dropped(key: str, setting: Setting) -> None:
    config = _config_with(key, VALUES.get(key, _sample(setting)))
    for prefix, more in EXTRA.items():
        if key.startswith(prefix):
            config = _merge(config, more)
    if key.startswith("elasticity."):
        config.pop("train_batch_size")
        config["elasticity"].pop("prefer_larger_batch_size", None)
        config["elasticity"] |= {"version": 0.2, "num_gpus_per_node": 2, "model_parallel_size": 1}
    translated_config = DeepSpeedConfig(config)
    _, report = translated_config.to_plan(world_size=8)
    given = [leaf for leaf, _ in leaves_of(translated_config.values, KNOWN)]
    assert [entry.key for entry in report if "(not given)" not in entry.key] == given
    for entry in report:
        assert entry.verdict is not Verdict.REFUSED or entry.reason


def test_own_autos_of_deepspeed_need_no_fill() -> None:
    plan, _ = translated(pipeline={"stages": AUTO})
    assert plan.mesh.pp == 1


# --- stages and offload ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "strategy"), [(1, "shard_optimizer"), (2, "shard_grad_op"), (3, "full_shard"), (True, "shard_optimizer")]
)
def test_a_stage_is_a_strategy(stage: Any, strategy: str) -> None:
    plan, _ = translated(**zero(stage=stage))
    assert plan.fsdp.strategy == strategy
    assert (plan.mesh.dp, plan.mesh.shard) == (1, -1)
    plan.resolve(8).validate(8)


def test_stage_one_with_offload_shards_gradients_too() -> None:
    plan, report = translated(**zero(stage=1, offload_optimizer={"device": "cpu"}))
    assert plan.fsdp.strategy == "shard_grad_op"
    assert report["zero_optimization.stage"].verdict is Verdict.EQUIVALENT


def test_the_flag_of_old_versions_offloads_the_optimizer() -> None:
    old, _ = translated(**zero(stage=2, cpu_offload=True))
    new, _ = translated(**zero(stage=2, offload_optimizer={"device": "cpu"}))
    assert old == new
    assert new.offload.enabled


def test_parameters_of_shards_are_offloaded_and_those_of_one_rank_paged() -> None:
    keys = zero(stage=3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
    alone, report = translated(world_size=1, **keys)
    assert not report.refused
    assert alone.offload.params
    together, report = translated(world_size=2, fp16={"enabled": True}, **keys)
    assert not report.refused
    assert report["zero_optimization.offload_param.device"].verdict is Verdict.HONOURED
    assert (together.mesh.shard, together.fsdp.strategy, together.precision.dtype) == (-1, "full_shard", "fp16")
    offload = together.offload
    assert (offload.params, offload.grads, offload.optimizer_state) == (True, True, True)
    together.validate(world_size=2)
    _, report = translated(**zero(stage=2, offload_param={"device": "cpu"}))
    assert [entry.key for entry in report.refused] == ["zero_optimization.offload_param.device"]
    split, report = translated(**keys, pipeline={"stages": 2})
    assert "offload works on replicas and shards" in report["zero_optimization.offload_param.device"].reason
    assert not split.offload.enabled


def test_parameters_go_to_the_disk_that_the_config_names(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
    plan, report = translated(world_size=4, **zero(stage=3, offload_param=section))
    assert not report.refused
    assert (plan.offload.params, plan.offload.disk_dir, plan.offload.pin_cpu_memory) == (True, str(tmp_path), False)
    plan.validate(world_size=4)


def test_offload_to_disk_needs_a_path_and_says_if_it_is_not_there(tmp_path: Path) -> None:
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    plan, report = translated(**zero(stage=3, offload_optimizer=section))
    assert plan.offload.disk_dir == str(tmp_path)
    assert "no such directory" not in report["zero_optimization.offload_optimizer.nvme_path"].reason
    section["nvme_path"] = "/nowhere/at/all"
    _, report = translated(**zero(stage=3, offload_optimizer=section))
    assert "no such directory on this machine" in report["zero_optimization.offload_optimizer.nvme_path"].reason
    with pytest.raises(ConfigurationError, match=r"device is nvme, but .*nvme_path is not given"):
        translated(**zero(stage=3, offload_optimizer={"device": "nvme"}))
    with pytest.raises(ConfigurationError, match="must be one of none, cpu, nvme; got 'nvm'"):
        translated(**zero(stage=3, offload_optimizer={"device": "nvm"}))


def test_part_of_the_state_may_stay_on_the_device() -> None:
    plan, _ = translated(**zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.25}))
    assert plan.offload.device_optimizer_ratio == 0.75
    with pytest.raises(ConfigurationError, match="needs stage 3"):
        translated(**zero(stage=2, offload_optimizer={"device": "cpu", "ratio": 0.25}))


def test_shards_within_groups_are_replicas_of_shards() -> None:
    plan, _ = translated(world_size=8, **zero(stage=3, mics_shard_size=4))
    assert (plan.mesh.dp, plan.mesh.shard, plan.fsdp.strategy) == (-1, 4, "hybrid_shard")
    plan, _ = translated(world_size=4, **zero(stage=3, mics_shard_size=4))
    assert (plan.mesh.dp, plan.mesh.shard, plan.fsdp.strategy) == (1, -1, "full_shard")


def test_quantized_collectives_are_codecs() -> None:
    plan, _ = translated(**zero(stage=3, zero_quantized_weights=True, zero_quantized_gradients=True))
    assert plan.fsdp.gather_codec == "int8"
    assert (plan.compress.method, plan.compress.error_feedback) == ("int8", "none")


def test_axes_become_degrees_and_the_batch_counts_data_ranks_only() -> None:
    plan, _ = from_deepspeed(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "tensor_parallel": {"autotp_size": 2},
            "pipeline": {"stages": 2, "partition": "parameters"},
        },
        world_size=8,
    )
    assert (plan.mesh.tp, plan.mesh.pp) == (2, 2)
    assert plan.training.batch_size == 2 * 4 * 2
    assert plan.pipeline.num_microbatches == 4
    assert plan.training.gradient_accumulation == 1
    plan, _ = translated(world_size=4, sequence_parallel_size=2)
    assert (plan.mesh.cp, plan.context.form) == (2, "ulysses")


# --- formats -----------------------------------------------------------------------------------------------------


def test_two_formats_at_once_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"fp16.enabled and bf16.enabled are both true"):
        translated(fp16={"enabled": True}, bf16={"enabled": True})


def test_gradients_travel_in_the_models_format_unless_told_otherwise() -> None:
    plan, report = translated(bf16={"enabled": True})
    assert plan.precision.reduce_dtype == "bf16"
    assert report["communication_data_type (not given)"].value == "bf16"
    plan, _ = translated(bf16={"enabled": True}, communication_data_type="fp32")
    assert plan.precision.reduce_dtype == "same"


def test_a_fixed_loss_scale_does_not_grow() -> None:
    plan, _ = translated(fp16={"enabled": True, "loss_scale": 128})
    assert plan.precision.init_loss_scale == 128
    assert plan.precision.loss_scale_growth_interval > 10**9


@pytest.mark.parametrize(("level", "dtype"), [("O0", "fp32"), ("O1", "fp16")])
def test_apex_levels_without_16_bit_weights_are_autocast(level: str, dtype: str) -> None:
    plan, report = translated(amp={"enabled": True, "opt_level": level})
    assert plan.precision.dtype == dtype
    assert not report.refused
    assert translated(amp={"enabled": True, "opt_level": "O2"})[1].refused


# --- defaults that changed ---------------------------------------------------------------------------------------


def test_clipping_that_is_not_given_follows_the_version() -> None:
    assert from_deepspeed({"train_batch_size": 4})[0].training.gradient_clipping == 1.0
    plan, report = from_deepspeed({"train_batch_size": 4}, version="0.16.4")
    assert plan.training.gradient_clipping is None
    assert report["gradient_clipping (not given)"].value == 0.0
    assert from_deepspeed({"train_batch_size": 4, "gradient_clipping": 0})[0].training.gradient_clipping is None


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (zero(stage3_prefetch_bucket=1), "did you mean stage3_prefetch_bucket_size"),
        (zero(stage=4), "must be one of 0, 1, 2, 3; got 4"),
        (zero(stage="three"), "zero_optimization.stage must be"),
        ({"fp16": {"enabled": "perhaps"}}, "fp16.enabled must be true or false; got 'perhaps'"),
        ({"fp16": True}, "fp16 must be a section of keys; got True"),
        ({"communication_data_type": "fp8"}, "communication_data_type must be one of fp16, bf16, fp32"),
        ({"steps_per_print": 0}, "steps_per_print must be at least 1; got 0"),
        ({"optimizer": {"type": "AdamWW"}}, "did you mean adamw"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer has no type"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "clip with gradient_clipping"),
        ({"optimizer": {"type": "AdamW", "params": {"wd": 1}}}, "optimizer.params.wd is not a param of AdamW"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "lacks total_num_steps"),
        ({"scheduler": {"type": "Cosine"}}, "is not a schedule of DeepSpeed"),
        (
            {"curriculum_learning": {"enabled": True, "min_difficulty": 1, "max_difficulty": 2}},
            "a curriculum needs schedule_type",
        ),
    ],
)
def test_a_mistake_is_one_message_with_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        translated(**keys)
    assert re.search(message, f"{caught.value.message} ({caught.value.hint})", re.DOTALL), str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError, match="has 3 problems"):
        translated(fp16={"enabled": 3}, **zero(stage=7, round_robin=True))


@pytest.mark.parametrize(
    ("keys", "name", "nearest"),
    [
        ({"gradient_clipp1ng": 1}, "gradient_clipp1ng", "gradient_clipping"),
        (
            {"activation_checkpointing": {"partition_activation": True}},
            "activation_checkpointing.partition_activation",
            "partition_activations",
        ),
    ],
)
def test_a_key_that_deepspeed_ignores_is_a_warning_by_name_and_an_error_if_strict(
    keys: dict[str, Any], name: str, nearest: str, caplog: pytest.LogCaptureFixture
) -> None:
    plan, report = translated(**keys)
    assert f"{name} is not a key of" in caplog.text
    assert f"DeepSpeed ignores it: did you mean {nearest}?" in caplog.text
    assert report[name].verdict is Verdict.HINT
    assert nearest in report[name].reason
    assert plan == translated()[0]
    with pytest.raises(ConfigurationError, match=f"{re.escape(name)} is not a key of"):
        DeepSpeedConfig({"train_batch_size": 16, **keys}, strict=True)


def test_values_are_taken_as_deepspeed_takes_them() -> None:
    found = DeepSpeedConfig(
        {
            "train_batch_size": 16,
            "zero_allow_untested_optimizer": 1,
            "gradient_clipping": -1,
            "fp16": {"enabled": "yes", "loss_scale_window": "500"},
            "zero_optimization": {"stage": 3, "param_persistence_threshold": 10, "max_live_parameters": 5},
        }
    )
    assert found.get("zero_allow_untested_optimizer") is True
    assert found.get("fp16.enabled") is True
    assert found.get("fp16.loss_scale_window") == 500
    assert found.get("zero_optimization.stage3_param_persistence_threshold") == 10
    assert found.get("zero_optimization.stage3_max_live_parameters") == 5
    plan, report = found.to_plan(world_size=2)
    assert not report.refused
    assert plan.training.gradient_clipping is None


def test_an_optimizer_of_ours_alone_is_refused_with_what_to_write() -> None:
    _, report = translated(optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}})
    assert {entry.key for entry in report.refused} == {
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.freeze_step",
    }
    assert "compress.method = sign" in report["optimizer.type"].reason


def test_adam_is_adamw_without_weight_decay_unless_told_otherwise() -> None:
    _, report = translated(optimizer={"type": "Adam", "params": {"lr": 1e-3}})
    assert report["optimizer.type"].means == "torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0)"
    _, report = translated(optimizer={"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}})
    assert report["optimizer.type"].means.startswith("torch.optim.Adam(")
    _, report = translated(optimizer={"type": "AdamW", "params": {"torch_adam": True}})
    assert report["optimizer.type"].means == "torch.optim.AdamW(model.parameters())"


# --- the elastic batch -------------------------------------------------------------------------------------------


def test_the_elastic_batch_replaces_the_batch_keys() -> None:
    section = {
        "enabled": True,
        "max_train_batch_size": 100,
        "micro_batch_sizes": [2, 4],
        "max_gpus": 16,
        "version": 0.1,
    }
    plan, report = from_deepspeed({"elasticity": section}, world_size=4)
    assert plan.training.batch_size == 96
    assert plan.training.gradient_accumulation == 6
    assert plan.elastic.max_workers == 16
    assert not report.refused
    with pytest.raises(ConfigurationError, match="elasticity decides the batch"):
        from_deepspeed({"elasticity": section, "train_batch_size": 4})
    plan, _ = from_deepspeed(
        {"elasticity": {**section, "ignore_non_elastic_batch_info": True}, "train_batch_size": 4}, world_size=4
    )
    assert plan.training.batch_size == 96
