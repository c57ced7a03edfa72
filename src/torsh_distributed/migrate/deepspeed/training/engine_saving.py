"""What an engine saves and loads: checkpoints under tags, weights as one file, the module's state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torsh_distributed.migrate.deepspeed.deepspeed_errors import NotOfThisEngine
from torsh_distributed.migrate.deepspeed.moe.expert_modules import as_listed, stacks_of
from torsh_distributed.migrate.deepspeed.training.loss_scales import LossScaler
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.tagged_checkpoints import TaggedCheckpoints
from torsh_distributed.migrate.deepspeed.zero.whole_between_steps import WholeBetweenSteps, frozen_names, whole_weights
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)


class EngineSaving:
    """The part of DeepSpeedEngine that saves and loads; every rank makes the same calls."""

    _core: Engine
    _settings: RunSettings
    module: nn.Module
    global_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    micro_steps: int
    lr_scheduler: Any
    loaded_checkpoint_tag: str | None
    loss_scaler: LossScaler

    def _begin_saving(self) -> None:
        # In stage 1 with fp32 gradients of bf16 parameters too.
        is_whole_to_scripts = self._settings.stage in (1, 2) and isinstance(self._core.strategy, Sharded)
        self._whole = WholeBetweenSteps(self._core) if is_whole_to_scripts else None
        self._checkpoints = TaggedCheckpoints(self._core, self._settings)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything under `save_dir/tag`; every rank calls this. The tag is `global_step{N}` unless given.

        Without frozen parameters it is loaded with `load_module_strict=False`, into a model that has them.
        """
        exclude = frozen_names(self.module) if exclude_frozen_parameters else set()
        with self._as_held():
            return self._checkpoints.save(
                self,
                save_dir,
                tag=tag,
                client_state=client_state or {},
                save_latest=save_latest,
                exclude=exclude,
            )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., None] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` wrote, at any world size, or a checkpoint that DeepSpeed itself wrote."""
        if custom_load_fn is not None:
            raise NotOfThisEngine(
                "load_checkpoint(custom_load_fn=…) is not supported: shards are read one by one",
                hint="load the file yourself and call engine.load_module_state_dict(state)",
            )
        with self._as_held():
            return self._checkpoints.load(
                self,
                Path(load_dir),
                tag=tag,
                strict=load_module_strict,
                with_optimizer=load_optimizer_states and not load_module_only,
                with_scheduler=load_lr_scheduler_states and not load_module_only,
                module_only=load_module_only,
            )

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the module's state as one file, as torch.save does; every rank calls this. Rank 0 writes.

        Under stage 3 it needs `stage3_gather_16bit_weights_on_model_save`; without, nothing is written and False is
        returned, as in DeepSpeed.
        """
        zero = self._settings.section("zero_optimization")
        names = "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"
        if self._settings.stage == 3 and not any(zero.get(name) is True for name in names):
            _log.warning("did not save the model %s: zero_optimization.%s is false", save_filename, names[0])
            return False
        exclude = frozen_names(self.module) if exclude_frozen_parameters else set()
        with self._as_held():
            return self._checkpoints.save_weights(Path(save_dir) / save_filename, exclude=exclude)

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self, destination: Any = None, prefix: str = "", keep_vars: bool = False, **_: object
    ) -> dict[str, Any]:
        """The module's state with whole tensors, on every rank; every rank calls this."""
        with self._as_held():
            whole = as_listed(self._core.strategy.whole_tensors(), stacks_of(self.module))
            return {f"{prefix}{name}": value for name, value in whole}

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **_: object) -> None:
        """Load whole tensors into the module; masters follow. Every rank calls this with the same state."""
        with self._as_held():
            self._checkpoints.load_module(checkpoint.get("module", checkpoint), strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The module's state with whole tensors, on rank 0; None on the others. Every rank calls this."""
        exclude = frozen_names(self.module) if exclude_frozen_parameters else set()
        with self._as_held():
            found = whole_weights(self._core.strategy, keeps=self.global_rank == 0, exclude=exclude)
        return found if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _as_held(self) -> AbstractContextManager[None]:
        """Around what reads or writes the module's state as this rank holds it."""
        return nullcontext() if self._whole is None else self._whole.as_held()
