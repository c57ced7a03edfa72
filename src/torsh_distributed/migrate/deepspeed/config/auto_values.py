""" "auto" in a config: what a trainer fills in before DeepSpeed sees it, here from a dict of fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import AUTO, Setting, leaves_of, setting_at
from torsh_distributed.migrate.report import Verdict
from torsh_distributed.plan.problems import Problem, did_you_mean

FILLED_BY: Mapping[str, str] = {
    "train_batch_size": "micro-batch × accumulation × ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm, or 1.0",
    "fp16.enabled": "fp16, or mixed_precision",
    "bf16.enabled": "bf16, or mixed_precision",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "[adam_beta1, adam_beta2]",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_min_lr": "0",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.total_num_steps": "max_steps",
}
"""Which argument of HF's trainer fills a key."""


def fill(values: dict[str, Any], fills: Mapping[str, Any]) -> list[Problem]:
    """Put `fills`, by key in full, in place of "auto"; the problems that are left. Changes `values`.

    What only tunes a mechanism that works in another way here needs no fill: its "auto" is a hint like any value.
    """
    found: list[Problem] = []
    autos = dict(_autos(values))
    for key, value in fills.items():
        if key not in autos:
            hint = did_you_mean(key, autos) or f'"auto" stands in: {", ".join(autos) or "none"}'
            found.append(Problem(key, f'a fill is given for {key}, which is not "auto" in the config', hint))
            continue
        _put(values, key, value)
    for key, setting in autos.items():
        if key in fills or (setting is not None and setting.verdict is Verdict.HINT):
            continue
        source = FILLED_BY.get(key)
        filled = f" from {source}" if source else ""
        found.append(
            Problem(key, f'{key} is "auto", which a trainer fills{filled}', f"write a number, or give a fill for {key}")
        )
    return found


def _autos(values: Mapping[str, Any]) -> Iterator[tuple[str, Setting | None]]:
    for key, value in leaves_of(values, KNOWN):
        setting = setting_at(key, KNOWN)
        if not isinstance(setting, Setting):
            for inner, inside in _deep(key, value):
                if inside == AUTO:
                    yield inner, None
        elif value == AUTO and not setting.is_own_auto:
            yield key, setting


def _deep(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from _deep(f"{key}.{name}", inside)
    else:
        yield key, value


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    place = values
    for section in sections:
        place = place[section]
    place[name] = value
