"""`PipelineEngine`: trains a PipelineModule by whole batches."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.deepspeed.config.deepspeed_config import DeepSpeedConfig
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.engine_setup import choose_optimizer, settings_of
from torsh_distributed.migrate.deepspeed.initialize_group import rank_device
from torsh_distributed.migrate.deepspeed.pipe.pipeline_module import PipelineModule
from torsh_distributed.migrate.deepspeed.schedules.script_schedule import choose_scheduler
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine
from torsh_distributed.migrate.deepspeed.training.loss_scales import make_scaler
from torsh_distributed.migrate.deepspeed.training.master_weights import MasterWeights
from torsh_distributed.migrate.deepspeed.training.microbatch_loop import RepeatingLoader, cast_params
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.update_step import UpdateStep
from torsh_distributed.parallel.composed.pipeline_strategy import PipelineStages
from torsh_distributed.parallel.mesh.mesh_reduction import HostValue
from torsh_distributed.parallel.models.label_share import LabelRule
from torsh_distributed.parallel.pipeline.microbatches import Microbatched, shapes_of
from torsh_distributed.parallel.pipeline.runtime import LocalStages
from torsh_distributed.parallel.strategy import LossFn, PendingNumber
from torsh_distributed.parallel.torch_internals import tree_map
from torsh_distributed.plan import Plan
from torsh_distributed.train.assemble import parallelize
from torsh_distributed.train.batches import to_device
from torsh_distributed.train.loss import loss_of

_log = logging.getLogger(__name__)

_CALLED = "Only train_batch() is accessible in pipeline mode."


class PipelineError(RuntimeError):
    """A call that a pipeline does not have."""


class PipelineEngine(DeepSpeedEngine):
    """`train_batch` and `eval_batch` take microbatches from an iterator; every rank makes the same calls.

    Ranks of one replica read the same data; those of stages between the first and the last may have none.
    """

    def __init__(self, *args: Any, source: PipelineModule, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.source = source
        self.num_stages, self.stage_id = source.num_stages, source.stage_id
        self.grid = self.mpu = source.mpu()
        self.is_pipe_parallel, self.is_data_parallel = self.num_stages > 1, self.dp_world_size > 1
        self.is_model_parallel = False
        self.prev_stage, self.next_stage = self.stage_id - 1, self.stage_id + 1
        self.micro_batches, self.micro_batch_size = self.gradient_accumulation_steps(), self._settings.batch.micro
        self._reads_apart: dict[bool, bool] = {}
        """Whether some rank between the ends has no data, in training and in evaluation; asked when first needed."""
        # Scripts ask `engine.module` for what they gave their own subclass of PipelineModule.
        if isinstance(self.module, LocalStages):  # otherwise one stage is all of it: the script's own
            self.module.__class__ = StagesOfScript
            self.module.__dict__["source"] = source
        self._batch_fn: Callable[[Any], Any] | None = None
        self._data: Iterator[Any] | None = None
        self.agg_train_loss: Tensor | None = None
        self.total_loss: Tensor | None = None
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    @property
    def _loss_fn(self) -> LossFn:
        return _loss_fn_of(self.source)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One update on `gradient_accumulation_steps` microbatches; returns their mean loss, on every rank."""
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.train()
        parts = self._parts(self._next_batch(self.gradient_accumulation_steps()))
        self._update.began()
        means = [self._pass(part, len(parts), is_last=index == len(parts) - 1) for index, part in enumerate(parts)]
        value = sum(mean.wait() for mean in means) / len(means)
        self._update.set_mean(HostValue(torch.tensor(value)))
        with self._report.timing("step"):
            self._take_model_step({})
        self.micro_steps += self.gradient_accumulation_steps()
        self.agg_train_loss = self.total_loss = torch.tensor(value, device=self.device)
        if self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/train_loss", value, self.global_samples)])
        self._report.after_step(self, is_boundary=True)
        return self.agg_train_loss

    def _pass(self, part: tuple[Any, Any], num_parts: int, *, is_last: bool) -> PendingNumber:
        """Forward and backward of a part of the batch, which the loss is the mean of."""
        core, scale = self._core, self._update.scaler.loss_scale
        core.strategy.expect_scale(scale)
        with self._report.timing("forward"), events.phase("forward"), core.strategy.accumulating(is_last=is_last):
            loss = core.strategy.loss(core.model, part, self._loss_fn, loss_of)
        self._loop.hooks.attach()
        mean = core.strategy.mean_loss(loss)
        with self._report.timing("backward"), events.phase("backward"), core.strategy.accumulating(is_last=is_last):
            (loss * (scale / num_parts)).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        return mean

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of some microbatches, on every rank; with `return_logits` the outputs of all beside it."""
        require(
            reduce_output in ("avg", "sum"),
            "eval_batch reduces the losses of microbatches to their mean or sum",
            hint='write reduce_output="avg"; call eval_batch with num_micro_batches=1 for single ones',
            got=reduce_output,
        )
        was_training = self.training
        self.eval()
        try:
            count = num_micro_batches or self.gradient_accumulation_steps()
            pairs = self._next_batch(count, data_iter)
            logits = self._outputs([inputs for inputs, _ in pairs]) if return_logits or not compute_loss else None
            if not compute_loss:
                return (logits, logits) if return_logits else logits
            strategy, model = self._core.strategy, self._core.model
            losses = [strategy.loss(model, self._parts([pair])[0], self._loss_fn, loss_of) for pair in pairs]
            value = strategy.mean_loss(torch.stack(losses).mean()).wait()
            mean = torch.tensor(value, device=self.device)
        finally:
            self.train(was_training)
        mean = mean * count if reduce_output == "sum" else mean
        return (mean, logits) if return_logits else mean

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Where microbatches come from, again and again."""
        self.training_dataloader = loader
        self._data = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Where microbatches come from."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Applied to each microbatch as it is read."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Nothing to do: a batch of other shapes is noticed when it is read."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing to do: what passes between stages is found out by running them."""

    def is_first_stage(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage_id == self.num_stages - 1

    @override
    def is_gradient_accumulation_boundary(self) -> bool:
        """A batch is a whole accumulation."""
        return True

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(_CALLED)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise PipelineError(_CALLED)

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        raise PipelineError(_CALLED)

    def _parts(self, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """What runs one after the other: a schedule of all microbatches, or, in one stage, each of them."""
        if self.num_stages == 1:
            return [((inputs,), targets) for inputs, targets in pairs]  # a tuple of inputs is one argument
        return [(Microbatched(inputs for inputs, _ in pairs), Microbatched(targets for _, targets in pairs))]

    def _outputs(self, inputs: list[Any]) -> Any:
        """The model's outputs for all microbatches, joined."""
        held = [one if self.num_stages == 1 else Microbatched((one,)) for one in inputs]
        found = [self._core.model(one) for one in held]
        return tree_map(lambda *parts: torch.cat(parts) if parts[0].dim() else torch.stack(parts), *found)

    def _next_batch(self, count: int, data: Iterator[Any] | None = None) -> list[tuple[Any, Any]]:
        """Microbatches of inputs and targets."""
        source = data if data is not None else self._data
        if not self._some_read_apart(has_data=source is not None):
            assert source is not None, "every rank has data, or all have raised"
            return _all_of(self._read(source, count), count)
        group = self._pipe_group()
        found = [] if source is None else self._read(source, count)
        shapes = str([*map(shapes_of, found)]) if len(found) == count else ""
        told = str(broadcast_object(shapes, dist.get_global_rank(group, 0), group=group))
        if source is None and told:
            # In the place of a batch: another one for other shapes, so that this stage sees them change.
            found = [({told: None}, None)] * count
        return _all_of(found, count)

    def _read(self, source: Iterator[Any], count: int) -> list[tuple[Any, Any]]:
        """Up to `count` microbatches."""
        read = [self._batch_fn(one) if self._batch_fn is not None else one for one in itertools.islice(source, count)]
        return [to_device((_given(one[0]), _given(one[1])), self.device) for one in read]

    def _some_read_apart(self, *, has_data: bool) -> bool:
        """Whether stages between the ends go without data; scripts do this in every batch or in none."""
        if self.training not in self._reads_apart:
            has_middle = self.num_stages > 2
            told: list[bool] = all_gather_object(has_data, group=self._pipe_group()) if has_middle else [has_data]
            if not (told[0] and told[-1]):
                raise InvalidArgument(
                    "there is no data: the first or the last stage got no iterator",
                    hint="pass data_iter=…, or training_data to deepspeed.initialize, on these stages at the least",
                )
            self._reads_apart[self.training] = not all(told)
        reads_apart = self._reads_apart[self.training]
        if not has_data and not reads_apart:
            raise InvalidArgument(
                f"there is no data on stage {self.stage_id}, which had some in the first batch",
                hint="pass data_iter=… in every call; stages between the first and the last may have none in all calls",
            )
        return reads_apart

    def _pipe_group(self) -> dist.ProcessGroup:
        strategy = self._core.strategy
        assert isinstance(strategy, PipelineStages), "there are several stages"
        return strategy.pipe.group


def _all_of(pairs: list[Any], count: int) -> list[Any]:
    if len(pairs) < count:
        raise StopIteration(f"the data ended after {len(pairs)} of {count} microbatches")
    return pairs


class StagesOfScript(LocalStages):
    """This rank's layers; what they lack, and is not a layer, is the script's PipelineModule's."""

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.__dict__["source"], name)
            if isinstance(found, nn.Module | Tensor):
                raise
            return found


def _given(value: Any) -> Any:
    """A loader makes lists of tuples; layers and losses get tuples, as in DeepSpeed."""
    return tuple(value) if isinstance(value, list) else value


def _loss_fn_of(model: PipelineModule) -> LossFn:
    """The module's; without one its last layer returns the loss of a microbatch."""
    return _output_is_the_loss if model.loss_fn is None else model.loss_fn


def _output_is_the_loss(outputs: Any, targets: Any) -> Tensor:
    require(
        isinstance(outputs, Tensor) and outputs.numel() == 1,
        "a PipelineModule without loss_fn returns the loss, one number, from its last layer",
        hint="pass loss_fn=…",
        got=tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__,
    )
    loss: Tensor = outputs.reshape(())
    return loss


def make_pipeline_engine(
    model: PipelineModule,
    config: DeepSpeedConfig,
    *,
    optimizer: Optimizer | Callable[..., Optimizer] | None,
    model_parameters: Any,
    lr_scheduler: Any,
    training_data: Any,
    collate_fn: Callable[..., Any] | None,
) -> PipelineEngine:
    """The engine of a pipeline; every rank calls this."""
    settings = settings_of(config, process_group.world_size() // model.num_stages, is_pipeline=True)
    require(
        settings.stage < 2,
        "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        hint="use zero_optimization.stage 0 or 1: a stage is already a part of the model",
    )
    if settings.accumulates_in_fp32 and process_group.rank() == 0:
        _log.warning(
            "data_types.grad_accum_dtype fp32 has no effect in a pipeline: gradients of microbatches add up in %s",
            settings.dtype,
        )
    model.to(rank_device())
    model.recompute_layers()
    cast_params(model, settings.dtype, None)
    inner = choose_optimizer(settings, model, optimizer, model_parameters)
    outer = MasterWeights(inner) if settings.dtype is not torch.float32 else inner
    core = parallelize(model, outer, _plan(model, settings), loss_fn=_loss_fn_of(model))
    core.strategy.count_labels(LabelRule(is_uniform=True))  # a batch's loss is the mean of its microbatches'
    if isinstance(core.optimizer, MasterWeights):
        core.optimizer.make_masters(core.strategy.state_parts().like)
    return PipelineEngine(
        core,
        settings,
        UpdateStep(core, settings, make_scaler(settings.section("fp16"), is_zero=settings.stage > 0)),
        lr_scheduler=choose_scheduler(settings, lr_scheduler, inner, core.optimizer),
        training_data=training_data,
        collate_fn=collate_fn,
        client_optimizer=inner if optimizer is not None else None,
        source=model,
    )


def _plan(model: PipelineModule, settings: RunSettings) -> Plan:
    """Stages where the module cuts them; a microbatch of the config is one of the schedule.

    Ranks of a stage are neighbours, as in DeepSpeed's topology: the axis `shard` is inside pp, `dp` would be outside.
    """
    mesh = {"pp": model.num_stages, "dp": 1, "shard": -1}
    sections: dict[str, Any] = {
        "mesh": mesh,
        **({"ddp": {"broadcast_buffers": False}} if model.num_stages == 1 else {}),
        "precision": {"reduce_dtype": settings.reduce_dtype},
        "pipeline": {
            "num_microbatches": settings.batch.accumulation,
            # DeepSpeed takes fewer microbatches than stages, and lets stages wait; one-forward-one-backward does not.
            **({"schedule": "gpipe"} if settings.batch.accumulation < model.num_stages else {}),
            **({"balance": "manual", "split_points": list(model.split_points)} if model.num_stages > 1 else {}),
        },
    }
    return Plan.from_dict(sections)
