"""`DeepSpeedEngine`: DeepSpeed's training object on our Engine, for loops of forward, backward and step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.migrate.deepspeed.config.translators.batch_keys import BatchTriangle
from torsh_distributed.migrate.deepspeed.deepspeed_errors import NotOfThisEngine, require
from torsh_distributed.migrate.deepspeed.initialize_group import local_rank
from torsh_distributed.migrate.deepspeed.observing.engine_report import EngineReport
from torsh_distributed.migrate.deepspeed.surface.refused_names import REFUSED
from torsh_distributed.migrate.deepspeed.training.engine_saving import EngineSaving
from torsh_distributed.migrate.deepspeed.training.forward_extras import ForwardExtras
from torsh_distributed.migrate.deepspeed.training.master_weights import move_state
from torsh_distributed.migrate.deepspeed.training.microbatch_loop import MicrobatchLoop, batch_loader
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.setting_methods import SettingMethods
from torsh_distributed.migrate.deepspeed.training.untrained_model import NoOptimizer, no_optimizer
from torsh_distributed.migrate.deepspeed.training.update_step import UpdateStep
from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)


class DeepSpeedEngine(SettingMethods, EngineSaving, nn.Module):
    """Calls the model, computes and reduces gradients, updates, counts; `deepspeed.initialize` makes one.

    Every rank makes the same calls. Config values are methods, as in DeepSpeed; attributes that the engine lacks are
    those of the model.
    """

    def __init__(
        self,
        core: Engine,
        settings: RunSettings,
        update: UpdateStep,
        *,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        client_optimizer: Optimizer | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._core, self._settings, self._update = core, settings, update
        self._loop = MicrobatchLoop(core, settings, update)
        self.module = core.unwrapped
        self.optimizer: Optimizer | None = None if isinstance(core.optimizer, NoOptimizer) else core.optimizer
        self.basic_optimizer = self.client_optimizer = client_optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.device = next(self.module.parameters()).device
        self.local_rank, self.global_rank = local_rank(), process_group.rank()
        self.world_size, self.dp_world_size = process_group.world_size(), core.strategy.data_degree
        self.mp_world_size = 1
        self.mpu: Any = None
        """What `initialize` got as such."""
        self.collate_fn, self.training_data = collate_fn, training_data
        self._config: Any = None
        """The config as `initialize` read it: scripts look into it too. Any: a type of a higher layer."""
        self.loaded_checkpoint_tag: str | None = None
        self.is_compiled = False
        self._halves_inputs = settings.dtype is torch.float16 and bool(settings.value("fp16.auto_cast", False))
        self._extras = ForwardExtras(settings, self.module)
        self.progressive_layer_drop = self._extras.layer_drop
        self._boundary: bool | None = None
        self._is_stepping = self._step_applied = False
        self._num_backwards = 0
        self._begin_saving()
        self._report = EngineReport(settings, self.module, rank=self.global_rank, num_ranks=self.dp_world_size)
        self.flops_profiler = self._report.profiler
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        self.training = self.module.training
        self.loss_scaler = update.scaler
        core.optimizer.overflow = False  # type: ignore[attr-defined]  # DeepSpeed's optimizers have it
        core.optimizer.loss_scaler = update.scaler  # type: ignore[attr-defined]  # and this

    # --- step ---------------------------------------------------------------------------------------------------

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's outputs on this rank's microbatch."""
        if self._halves_inputs:
            inputs, kwargs = _halved(inputs), _halved(kwargs)
        if self.training:
            kwargs = {**kwargs, **self._extras.arguments(self.global_steps)}
        with self._report.timing(
            "forward", is_profiled=self.training and self.global_steps == self._report.profile_step
        ):
            return self._loop.forward(inputs, kwargs, ends_update=self._known_boundary())

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any) -> Tensor:
        """Add the gradients of `loss`; returns the loss divided by the number of accumulated microbatches."""
        self._require_optimizer("backward")
        self._num_backwards += 1
        is_last = self._settings.is_managed and self.is_gradient_accumulation_boundary()
        with self._report.timing("backward"):
            return self._loop.backward(
                loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas, ends_update=is_last
            )

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for a `backward()` that is called on it directly."""
        self._require_optimizer("scale")
        return self._loop.scale(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the parameters if this ends an accumulation; in any case one microbatch is done."""
        self._require_optimizer("step")
        require(
            not self._loop.is_inside_no_sync,
            "It is illegal to call Engine.step() inside no_sync context manager",
            hint="leave the `with` block first",
        )
        self._is_stepping, self._step_applied = True, False
        is_boundary = self.is_gradient_accumulation_boundary()
        try:
            with self._report.timing("step"):
                if is_boundary:
                    self._loop.finish_gradients()
                    self._extras.before_update(self.global_steps)
                    self._take_model_step(lr_kwargs or {})
                    if self._whole is not None:
                        self._whole.gather()
        finally:
            self._is_stepping = False
        self.micro_steps += 1
        self._report.after_step(self, is_boundary=is_boundary)

    def _require_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise no_optimizer(call)

    def _take_model_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        self._update.run()
        overflow = self._update.overflow
        self._core.optimizer.overflow = overflow  # type: ignore[attr-defined]  # DeepSpeed's optimizers have it
        self._step_applied = not overflow
        if overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        micro_samples = self._settings.batch.train // self._settings.batch.accumulation
        is_managed = self._settings.is_managed
        self.global_samples += self._settings.batch.train if is_managed else micro_samples * self._num_backwards
        self._num_backwards = 0

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Reduce what backward has not reduced yet; `step` does it too. Every rank calls this."""
        self._loop.finish_gradients()

    def get_pld_theta(self) -> float | None:
        """The share of layers that `progressive_layer_drop` keeps now; None if it is off."""
        return None if self.progressive_layer_drop is None else self.progressive_layer_drop.get_theta()

    # --- boundaries of an accumulation ----------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch ends an accumulation: gradients are complete, and `step` updates."""
        if self._boundary is not None:
            return self._boundary
        if not self._settings.is_managed:
            return self._is_stepping
        return (self.micro_steps + 1) % self._settings.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the script says where an accumulation ends."""
        self._boundary = is_boundary

    def _known_boundary(self) -> bool | None:
        """In forward: whether its backward ends an accumulation; None if the script may still say otherwise."""
        if self._boundary is not None or not self._settings.is_managed:
            return None
        return self.is_gradient_accumulation_boundary()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward whose gradients are not reduced yet; replicas only."""
        stage = self._settings.stage
        require(
            stage < 2,
            f"no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage {stage}",
        )
        require(not self._loop.is_inside_no_sync, "no_sync context manager reentry is unsupported")
        self._loop.is_inside_no_sync = True
        try:
            yield
        finally:
            self._loop.is_inside_no_sync = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Around the backwards of one update; shards reduce in each of them, with the same sum."""
        require(self._settings.stage > 0, "coalesce_grad_reduction requires ZeRO stage 1, 2 or 3")
        yield

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the parameters."""
        return self._step_applied

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        self._core.optimizer.zero_grad(set_to_none=True)

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def config(self) -> Mapping[str, Any]:
        """The config as it was given."""
        return self._settings.config

    @property
    def monitor(self) -> Any:
        """Where events are written: `monitor.enabled`, `monitor.write_events([(name, value, samples)])`."""
        return self._report.monitors

    @property
    def timers(self) -> Any:
        """The timers of `wall_clock_breakdown`."""
        return self._report.timers

    @property
    def tput_timer(self) -> Any:
        """Samples per second."""
        return self._report.throughput

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last forward, backward, step and their parts, if `wall_clock_breakdown` is on."""
        return self._report.timers.means()

    @property
    def cur_scale(self) -> float:
        """The present loss scale."""
        return self._update.scaler.loss_scale

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradient before clipping; inf if it was skipped, None before the first."""
        return self._update.norm

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        """The `type` of each group; groups without one are left out."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """The momentum of each group, or its betas."""
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def _of_groups(self, key: str) -> list[Any]:
        return [group[key] for group in self._core.optimizer.param_groups if key in group] or [0.0] * (key != "type")

    def get_batch_info(self) -> tuple[int, int, int]:
        """The size of a batch over all ranks, of a microbatch, and the number of microbatches."""
        batch = self._settings.batch
        return batch.train, batch.micro, batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the size of a batch over all ranks, by more or fewer microbatches."""
        per_pass = self._settings.batch.micro * self.dp_world_size
        if train_batch_size % per_pass:
            raise ValueError(f"train_batch_size {train_batch_size} is not a multiple of {per_pass}")
        micro = self._settings.batch.micro
        self._settings.batch = BatchTriangle(
            train=train_batch_size, micro=micro, accumulation=train_batch_size // per_pass
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the size of a microbatch; the number of microbatches stays."""
        gas = self._settings.batch.accumulation
        self._settings.batch = BatchTriangle(
            train=micro_batch_size * gas * self.dp_world_size, micro=micro_batch_size, accumulation=gas
        )

    @override
    def train(self, mode: bool = True) -> DeepSpeedEngine:
        super().train(mode)
        self._core.model.train(mode)
        return self

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Iterable[Any]:
        """A loader of this rank's microbatches of `dataset`."""
        options.setdefault("collate_fn", self.collate_fn)
        place = self._core.strategy.data_rank, self._core.strategy.data_degree
        return batch_loader(dataset, self._settings, place, batch_size=batch_size, device=self.device, **options)

    # --- what has less to do here ------------------------------------------------------------------------------------

    @override
    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None, **_: object) -> None:
        """torch.compile of the module, in place."""
        chosen = {} if backend is None else {"backend": backend}
        self.module.compile(**chosen, **dict(compile_kwargs or {}))
        self.is_compiled = True

    def empty_partition_cache(self) -> None:
        """Free parameters that forward left gathered."""
        self._core.strategy.reshard()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move the optimizer's state and the masters to host memory, between phases of a job."""
        move_state(self._core.optimizer, torch.device("cpu"))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved."""
        move_state(self._core.optimizer, self.device)

    def destroy(self) -> None:
        """Finish what is being written. The process group stays: other engines may use it."""
        self._core.finish_saves()
        self._report.close()

    @override
    def __getattr__(self, name: str) -> Any:
        """What the engine does not have is the model's."""
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            pass
        module = self.__dict__.get("_modules", {}).get("module")
        if module is not None and hasattr(module, name):
            return getattr(module, name)
        hint = REFUSED["engine"].get(name)
        if hint is not None:
            raise NotOfThisEngine(f"engine.{name} is not part of torsh_distributed's deepspeed", hint=hint)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _halved(values: Any) -> Any:
    """Floating-point tensors among inputs in fp16."""
    if isinstance(values, Tensor):
        return values.half() if values.is_floating_point() else values
    if isinstance(values, Mapping):
        return {name: _halved(value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(_halved(value) for value in values)
    return values
