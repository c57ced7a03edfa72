"""The Engine: runs training steps over the strategy that a plan names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed import events
from torsh_distributed.checkpoint.random_generators import gather_random_states, restore_random_states
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.events import step_notes
from torsh_distributed.observe.loops.counted_operations import CountedOperations
from torsh_distributed.observe.metrics.process_metrics import note_fact
from torsh_distributed.parallel.compiling import uncompiled
from torsh_distributed.parallel.mesh.mesh_reduction import HostValue
from torsh_distributed.parallel.random_streams import skips_layers, stream_of
from torsh_distributed.parallel.strategy import PendingNumber, Strategy
from torsh_distributed.plan import Plan
from torsh_distributed.train.batches import (
    Batch,
    DataOrder,
    RankBatch,
    count_samples,
    sharded,
    split_rows,
    to_device,
)
from torsh_distributed.train.inference.evaluation import evaluate
from torsh_distributed.train.inference.export import export_model
from torsh_distributed.train.inference.generation import generate
from torsh_distributed.train.job_changes.divided_batches import DividedBatches
from torsh_distributed.train.job_changes.elastic_steps import ElasticSteps
from torsh_distributed.train.job_changes.running_changes import RunningChanges
from torsh_distributed.train.learning_rate import LearningRate, SchedulerFn
from torsh_distributed.train.ledger.batch_feed import BatchFeed
from torsh_distributed.train.ledger.data_position import describe_data, describe_loader, length_of, require_same_data
from torsh_distributed.train.ledger.sample_ledger import SampleLedger
from torsh_distributed.train.loss import LossFn
from torsh_distributed.train.losses.engine_loss import EngineLoss, StepSetting
from torsh_distributed.train.parameters.trained_params import TrainedParams
from torsh_distributed.train.parameters.whole_weights import EditedPieces, whole_weights
from torsh_distributed.train.precision import make_precision
from torsh_distributed.train.speed.attention_kernel import attending_with
from torsh_distributed.train.update import GradientNorm, Update, require_finite

if TYPE_CHECKING:
    from torsh_distributed.checkpoint.files.manifest import CheckpointMetadata
    from torsh_distributed.train.checkpointing import EngineCheckpoints
    from torsh_distributed.train.comparing.first_batch import FirstBatchComparison
    from torsh_distributed.train.comparing.forward_changes import ForwardChanges
    from torsh_distributed.train.job_changes.auto_optimization import AutoOptimizationEngine
    from torsh_distributed.train.parameters.gradient_hooks import GradientHooks
    from torsh_distributed.train.recovery.step_recovery import StepRecovery

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Runs training steps: `step(batch)`, or `microbatches`, `forward`, `backward` and `apply` in your own loop."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        plan: Plan,
        *,
        loss_fn: LossFn | None,
        scheduler_fn: SchedulerFn | None = None,
    ) -> None:
        self.strategy = strategy
        self.optimizer = optimizer
        self.plan = plan
        self.num_steps = 0
        """Optimizer updates done so far."""
        self.num_skipped = 0
        """Updates skipped because gradients overflowed fp16."""
        self.ledger = SampleLedger()
        """Which samples are done, and whose those of the step in progress are."""
        self.loss = EngineLoss(loss_fn, plan, lambda: self.strategy.samples_group)
        self.device = next(strategy.unwrapped.parameters()).device
        # Which layers run is drawn on the CPU, and ranks of one mesh must run the same ones.
        self._has_one_stream = self.device.type == "cpu" and skips_layers(strategy.unwrapped)
        self.precision = make_precision(plan.precision, self.device)
        self.learning_rate = LearningRate(
            optimizer, plan.training, data_degree=strategy.data_degree, scheduler_fn=scheduler_fn
        )
        self.elastic: ElasticSteps | None = None
        """In an elastic job: what lets steps outlive a lost rank."""
        self.changes: RunningChanges | None = None
        """Under our launcher: what takes changes of the plan between two updates."""
        self.auto_optimization: AutoOptimizationEngine | None = None
        """Where the plan asks for it: what tries changes of the plan between two updates."""
        self.comparison: FirstBatchComparison | None = None
        """Until the first batch, for a model that is split: what compares it with one process."""
        self.forward_changes: ForwardChanges | None = None
        """For the first two updates: what looks for state that forwards change."""
        self.gradient_hooks: GradientHooks | None = None
        """The user's hooks on parameters, where gradients are not whole when autograd has them."""
        self._trained = TrainedParams(strategy.unwrapped, optimizer, follows_freezing=strategy.follows_freezing)
        splits = [f"mesh.{name}" for name in ("tp", "pp", "ep") if plan.mesh.degrees[name] > 1]
        self._edited = EditedPieces(strategy.unwrapped.parameters() if splits else (), " and ".join(splits))
        self.settings: dict[str, Any] = {}
        """What this rank was started with, plain values: all ranks have the same, and those that join later."""
        self.feed = BatchFeed(self.ledger, self.device, lambda: self.strategy)
        """This rank's share of the global batch in progress."""
        self.update: Update | None = None
        """The update in progress, from its first microbatch until it is applied or discarded."""
        self.opened_checkpoints: EngineCheckpoints | None = None
        """Those of `checkpoints`, once that was asked for."""
        self.gradient_norm = GradientNorm(optimizer, plan.training.gradient_clipping)
        step_notes.leave_steps_to_engine()
        self._recovery: StepRecovery | None = None
        if plan.recovery.acts_on_steps:
            from torsh_distributed.train.recovery.step_recovery import StepRecovery

            self._recovery = StepRecovery(self, plan.recovery)

    @property
    def epoch(self) -> int:
        """The epoch in progress, from 0."""
        return self.ledger.epoch

    @property
    def num_batches(self) -> int:
        """Batches of this epoch whose update is done."""
        return self.ledger.num_batches

    @property
    def model(self) -> nn.Module:
        """The wrapped module; `unwrapped` is the user's own."""
        return self.strategy.model

    @property
    def unwrapped(self) -> nn.Module:
        """The user's model, as it was given."""
        return self.strategy.unwrapped

    def batches(self, loader: Iterable[Batch], *, epochs: int | None = None) -> Iterator[Batch]:
        """This rank's share of every batch of `loader`, epoch after epoch until `training.steps` updates are done.

        The loader's batches are global: the same at every world size, each sample seen by one rank. A batch counts as
        done with its update, or when the next one is asked for. After a load the epoch resumes where it stopped.
        `epochs` ends the iteration earlier.
        """
        if self.elastic is None:
            require_same_data(describe_loader(loader, seed=self.plan.training.seed))
        else:  # one may join later: the steps compare
            self.settings["data"] = describe_loader(loader, seed=self.plan.training.seed)
            self.elastic.join()
        ledger, training = self.ledger, self.plan.training
        note_fact("epoch", ledger.epoch)
        last = None if epochs is None else ledger.epoch + epochs
        self._note_end(loader, last)
        if self.plan.checkpoint.enabled and self.elastic is None:  # one that joins later would wait for the others
            self.checkpoints.hold()
        while (last is None or ledger.epoch < last) and self.num_steps < training.steps:
            ledger.use_data(describe_data(loader, seed=training.seed))
            for piece in events.each_in_phase("data", self.feed.use(self._sharded(loader, self._order()))):
                yield self.feed.take(piece, self.num_steps)
                self.feed.leave()
                if not ledger.pass_over():  # rolled back: read again from where the ledger stands
                    break
                if self.num_steps >= training.steps:
                    self.settle()
                    return
            else:
                if ledger.num_batches == 0:
                    raise InvalidArgument(
                        "the loader gave no batch",
                        hint="does it have samples? drop_last leaves out a batch that is not full; "
                        "a generator gives each batch once",
                    )
                ledger.next_epoch()
                note_fact("epoch", ledger.epoch)

    def _note_end(self, loader: Iterable[Batch], last_epoch: int | None) -> None:
        """Tell whoever looks at the job how many steps it is to do, if epochs end it before `training.steps` do."""
        num_batches = None if last_epoch is None else length_of(loader)
        if last_epoch is not None and num_batches is not None:
            to_come = (last_epoch - self.ledger.epoch) * num_batches - self.ledger.num_batches
            note_fact("total_steps", min(self.plan.training.steps, self.num_steps + to_come))

    def step(self, batch: Batch) -> float:
        """One optimizer update on this rank's `batch`; returns the mean loss over the whole batch, on every rank.

        The batch is split into `training.gradient_accumulation` microbatches; gradients are averaged with the last.
        After an exception the parameters are unchanged, unless a rank died during the update itself. In an elastic job
        that goes on in place, a lost rank is no exception: the others do its part of the batch. Nor is what the plan's
        section `recovery` handles: a step that was rolled back returns the loss that caused it.
        """
        return self.step_once(batch) if self.elastic is None else self.elastic.step(batch)

    def step_once(self, batch: Batch) -> float:
        """`step` in the present world: raises if a rank is lost."""
        if self._recovery is not None:
            return self._recovery.step(batch)
        for piece in self.microbatches(batch):
            self.backward(self.forward(piece))
        return self.apply()

    def microbatches(self, batch: Batch, *, num_pieces: int | None = None) -> Iterator[Batch]:
        """Start an update: `batch` in `training.gradient_accumulation` parts, or fewer if it has fewer samples.

        Call `forward` and `backward` on each, then `apply`: the gradients are those of the whole batch. The gradients
        of an update that was started but never applied are discarded. `num_pieces` overrides the plan; the largest
        part is then the first.
        """
        self._before_update()
        events.reached("step", self.num_steps)
        is_again = self.update is not None and self.update.batch is batch
        self._forget_gradients()
        if self.plan.compile.enabled and self.plan.compile.cuda_graphs:
            # What the last step's recordings returned may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # untyped in torch
        num_samples = count_samples(batch)
        count = num_pieces or self.plan.training.gradient_accumulation
        pieces = split_rows(
            batch,
            num_samples,
            count,
            is_largest_first=num_pieces is not None,
            multiple=self.strategy.rows_multiple,
            at_least=1 if num_pieces is not None else self.feed.least_passes(count),
        )
        update = self.update = Update(num_samples=num_samples, batch=batch, pieces=pieces, is_again=is_again)
        for number, (piece, _) in enumerate(pieces):
            update.number, update.is_last = number, number == len(pieces) - 1
            yield piece

    def forward(self, batch: Batch) -> Tensor:
        """The loss of one (micro)batch, in the plan's precision."""
        update = self._begun()
        whole, pieces = (update.batch, update.pieces) if update.pieces else (batch, [(batch, 1.0)])
        if self.comparison is not None and torch.is_grad_enabled():
            comparison, self.comparison = self.comparison, None
            comparison.run(self.loss, self._setting, to_device(whole, self.device))
        if self.gradient_hooks is not None:
            self.gradient_hooks.take_late(self.strategy.whole_model, asks_others=self.asks_others)
        if update.weights is None:
            update.weights = self.loss.begin(
                self._setting, whole, pieces, evenness=self.feed.evenness, is_again=update.is_again
            )
        self.loss.is_borrowed = update.weights.is_borrowed(update.number)
        self.strategy.expect_scale(update.weights.before(update.number) * (self.precision.loss_scale or 1.0))
        with (
            events.phase("forward"),
            self.strategy.accumulating(is_last=update.is_last),
            attending_with(self.plan.training.attention),
            self.precision.computing(),
            stream_of(self._random_part, self.device),
            nullcontext() if self.forward_changes is None else self.forward_changes.watching(),
        ):
            return self.loss.compute(
                self.strategy, self.model, self.loss.guarded(batch, is_counted=update.weights.is_counted)
            )

    def backward(self, loss: Tensor) -> None:
        """Compute gradients of `loss`, scaled for the precision; the last microbatch averages them over the ranks."""
        update = self._begun()
        if update.weights is None:  # a loss of the user's own, from `engine.model`: a mean over this rank's samples
            pieces = update.pieces or [(None, 1.0)]
            update.weights = self.loss.begin_samples(self.strategy, pieces, evenness=self.feed.evenness)
        weight = update.weights.after(update.number, self.loss.take_count())
        weighted = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
        update.losses.append(weighted.detach())
        if update.is_last:
            if update.mean is not None:
                update.mean.wait()
            # Started before backward so it overlaps with it.
            update.mean = self.mean_loss(update.loss)
        with (
            events.phase("backward"),
            self.strategy.accumulating(is_last=update.is_last),
            attending_with(self.plan.training.attention),  # layers that are recomputed must take the same kernel
        ):
            scaled = self.precision.scaled(weighted)
            self.strategy.before_backward(scaled)
            scaled.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            self.strategy.after_backward(scaled)
        if update.weights.correction is not None:  # now, so that what a script does to gradients sees those of the step
            self.strategy.scale_gradients(update.weights.correction)
        if update.is_last:
            self._edited.note_gradients()

    def apply(self) -> float:
        """Clip as the plan says, update the parameters, clear the gradients, count the step; returns the mean loss.

        A loss or gradient that is not finite raises NonFiniteLoss on every rank and leaves the parameters unchanged;
        under fp16 all ranks skip such a step. Where the optimizer's kernels decide (fused, on a GPU), the host learns
        it one step later, because waiting would leave the GPU idle; `settle` asks at once.
        """
        self.settle()
        update = self.update
        if update is None or update.mean is None:
            raise InvalidArgument(
                "apply() comes after backward()", hint="call engine.backward(loss), not loss.backward()"
            )
        self._edited.check_gradients()
        loss = update.mean.wait()
        self.update = None
        rate = None
        scale = self.precision.loss_scale
        with events.phase("optimizer"):
            try:
                if scale is None:
                    require_finite("the loss", loss, self.strategy, self.num_steps + 1, update)
                if self.gradient_hooks is not None:  # before overflows are looked for: a hook may make one
                    self.gradient_hooks.run(self.strategy)
                is_done = self.precision.unscale(self.optimizer)
                with (
                    self.gradient_norm.clipped(
                        self.strategy, self.num_steps + 1, clip=is_done, is_scaled=scale is not None
                    ) as norm,
                    self.learning_rate.updating(self.num_steps) as rate,
                ):
                    self.precision.update(self.optimizer)
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        new_scale = self.precision.loss_scale
        if scale is not None and new_scale is not None and new_scale != scale:
            self.strategy.rescale(new_scale / scale)
        if is_done:
            self.num_steps += 1
            self.learning_rate.advance()
        else:
            self.num_skipped += 1
        if self.forward_changes is not None and self.forward_changes.update_done():
            self.forward_changes = None
        self.ledger.commit(self.num_steps - int(is_done))
        if self.changes is not None:
            self.changes.update_done()
        if self.auto_optimization is not None:
            self.auto_optimization.update_done()
        self._tell(update, loss, norm, rate=rate, scale=scale, is_done=is_done)
        if is_done and self.strategy.compressor is not None:
            self.strategy.compressor.adapt(loss)
        if is_done and (self.opened_checkpoints is not None or self.plan.checkpoint.enabled):
            self.checkpoints.after_step(loss)
        if self._recovery is None:  # else earlier values may come back
            self._edited.note_params()
        return loss

    def _tell(
        self,
        update: Update,
        loss: float,
        norm: HostValue | None,
        *,
        rate: float | None,
        scale: float | None,
        is_done: bool,
    ) -> None:
        """Emit the step's event, if somebody listens."""
        comm_s = self.strategy.take_comm_s()
        if not events.wanted(events.StepEvent):
            return
        events.emit(
            events.StepEvent(
                step=self.num_steps if is_done else self.num_steps + 1,
                loss=loss,
                duration_s=time.monotonic() - update.started,
                comm_s=comm_s,
                num_samples=self.feed.num_global(update.num_samples),
                grad_norm=None if norm is None else norm.wait(),
                learning_rate=rate,
                loss_scale=scale,
                is_skipped=not is_done,
                epoch=self.ledger.epoch if self.ledger.data else None,  # without data nobody counts passes
            )
        )

    def settle(self) -> None:
        """Wait for the last update; raise NonFiniteLoss if its gradient was not finite. Every rank calls this.

        All that uses or changes parameters calls it first. The update did not happen then, and is not counted.
        """
        norm = self.gradient_norm.take_failed()
        if norm is not None:
            self.num_steps -= 1
            require_finite("the norm of the gradient", norm, self.strategy, self.num_steps + 1)

    @property
    def checkpoints(self) -> EngineCheckpoints:
        """When this engine saves, where to, and how it comes back: the plan's section `checkpoint`."""
        if self.opened_checkpoints is None:
            # Here, not above: most of what it imports is for jobs that save.
            from torsh_distributed.train.checkpointing import EngineCheckpoints

            self.opened_checkpoints = EngineCheckpoints(self)
        return self.opened_checkpoints

    def save(self, path: str | os.PathLike[str] | None = None, *, wait: bool = True) -> None:
        """Save a checkpoint of this step under the directory `path`, or the plan's; every rank calls this.

        Each rank writes what it holds. With `wait`, returns once it is on the disk; else once it is copied into memory:
        a failure to write it then raises at the next save.
        """
        self._together(lambda: self.checkpoints.save(path, wait=wait))

    def load(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        strict: bool = True,
        model_only: bool = False,
    ) -> CheckpointMetadata:
        """Load the newest whole checkpoint under `path`, or the one of `step`, of any plan; every rank calls this.

        `model_only` leaves optimizer, step and generators as they are, for fine-tuning. Differences of names, shapes
        and dtypes raise, all at once; with `strict=False` what fits is loaded.
        """
        self._edited.forget_params()
        return self.checkpoints.load(path, step=step, strict=strict, model_only=model_only)

    def resume(self) -> CheckpointMetadata | None:
        """`load` the newest checkpoint of the plan's directory, if it has any; None if training starts from scratch.

        A worker that joins a running job loads nothing: it gets the state of the others at the first batch.
        """
        if self.elastic is not None and self.elastic.is_joining:
            return None
        self._edited.forget_params()
        return self.checkpoints.resume()

    def whole_weights(self, *patterns: str, change: bool = False) -> AbstractContextManager[dict[str, Tensor]]:
        """For a `with` block between two updates: parameters by name, whole on every rank, under any plan.

        `patterns` choose some: `"blocks.*.weight"`. A shared parameter is there once, as in `named_parameters()`. What
        the block writes is refused unless `change` is set; then every rank takes over what the first rank wrote. Every
        rank enters and leaves the block.
        """
        if self.update is not None:
            raise InvalidArgument(
                "whole_weights() comes between two updates",
                hint="call engine.apply() first, or engine.discard_update()",
            )
        self.settle()
        self._edited.forget_params()
        return whole_weights(self.strategy, patterns, change=change)

    @overload
    def evaluate(self, loader: Iterable[Batch]) -> float: ...

    @overload
    def evaluate(self, loader: Iterable[Batch], *, metrics: Mapping[str, Any]) -> dict[str, Any]: ...

    def evaluate(self, loader: Iterable[Batch], *, metrics: Mapping[str, Any] | None = None) -> float | dict[str, Any]:
        """The mean loss over every sample of `loader`, each evaluated by one rank; every rank gets the same value.

        With `metrics`, a dict of `loss` and the metrics: objects with `update(outputs, targets)`, `compute()` and
        `reset()`, as torchmetrics has them, or functions of outputs and targets, averaged over samples. Without a
        loss_fn they see the model's `logits` and the batch's `labels`.
        """
        self.settle()
        seed = self.plan.training.seed

        def compute() -> float | dict[str, Any]:
            require_same_data(describe_loader(loader, seed=seed))
            return evaluate(
                self.strategy,
                self._sharded(loader, DataOrder(seed=seed, compares_ranks=self.asks_others)),
                loss=self.loss,
                kind=lambda batch: self.loss.kind(self._setting, batch),
                precision=self.precision,
                device=self.device,
                metrics=metrics,
            )

        started_s = time.monotonic()
        with attending_with(self.plan.training.attention), self.strategy.together():
            found = self._together(compute)
        loss, duration_s = found["loss"] if isinstance(found, dict) else found, time.monotonic() - started_s
        events.emit(events.EvaluationEvent(step=self.num_steps, loss=float(loss), duration_s=duration_s))
        return found

    def export(
        self, directory: str | Path, *, dtype: Literal["fp32", "bf16", "fp16"] | None = None, max_file_gb: float = 4.0
    ) -> None:
        """Write the model to `directory` as safetensors files of at most `max_file_gb`; every rank calls this.

        `from_pretrained` loads what is written of a transformers model, and of a PEFT model the adapter. The first
        rank writes tensor by tensor; `dtype` converts floating-point values. All ranks raise if it cannot write.
        """
        self.settle()
        export_model(self.strategy, directory, dtype=dtype, max_file_gb=max_file_gb)

    def generate(self, *inputs: Any, **options: Any) -> Any:
        """The model's own `generate(*inputs, **options)`, for a look during training; every rank calls this.

        All ranks work on the tensors of rank 0 and get its result. Random numbers depend on the seed and the step
        only. A model split over tp, pp or cp is put together on rank 0, which must have room for it.
        """
        seed = self.plan.training.seed + self.num_steps
        with self.precision.computing(), self.strategy.together():
            return generate(self.strategy, self.device, seed, inputs, options)

    @torch.no_grad()
    def step_flops(self, batch: Batch) -> int:
        """Floating-point operations that forward and backward of this rank's `batch` need, counted in one forward.

        Backward counts twice as much as forward, recomputation not at all. Every rank calls this, between steps.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with uncompiled(), CountedOperations() as counter, self.precision.computing():
                self.loss.compute(self.strategy, self.unwrapped, to_device(batch, self.device))
        finally:
            self.model.train(was_training)
        return 3 * int(counter.num_forward_flops)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, at this or another world size; every rank calls this.

        All of it is equal on every rank except `rank_state`, which belongs to this rank.
        """
        self.settle()
        return {
            **self.strategy.whole_state(self.optimizer),
            "precision": self.precision.state_dict(),
            "learning_rate": self.learning_rate.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            **self.ledger.state_dict(),
            "random": gather_random_states(),
            "rank_state": {"place": self._place(), "strategy": self.strategy.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()`, at the same or another world size; every rank calls this.

        A rank may load its own state or that of another rank. `rank_state` is used only by the rank that saved it, in
        a world of the same size; otherwise that part starts empty.
        """
        self._edited.forget_params()
        self.strategy.load_whole_state(self.optimizer, state)
        self.precision.load_state_dict(state["precision"])
        self.learning_rate.load_state_dict(state["learning_rate"], data_degree=self.strategy.data_degree)
        self.num_steps = state["num_steps"]
        self.num_skipped = state["num_skipped"]
        self.ledger.load_state_dict(state)
        seed = self.plan.training.seed + self.num_steps + (self._random_part or 0)
        restore_random_states(state["random"], seed=seed)
        if list(state["rank_state"]["place"]) == self._place():
            self.strategy.load_state_dict(state["rank_state"]["strategy"])

    def finish_saves(self) -> None:
        """Wait until nothing is being written; every rank calls this."""
        if self.opened_checkpoints is not None:
            self.opened_checkpoints.wait()

    def mean_loss(self, loss: Tensor) -> PendingNumber:
        """Start to average this rank's `loss` over the ranks; in an elastic job they vote with it."""
        return self.strategy.mean_loss(loss) if self.elastic is None else self.elastic.mean_loss(loss)

    def discard_update(self) -> None:
        """Give up the update in progress, and what is not yet known of the one before."""
        self.update = None
        self.gradient_norm.forget()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _random_part(self) -> int | None:
        """Of the present world: a job that has lost a rank numbers the others again."""
        return None if self._has_one_stream else self.strategy.random_part

    def _together(self, call: Callable[[], T]) -> T:
        """What all ranks do together, outside of steps."""
        return call() if self.elastic is None else self.elastic.protected(call)

    @property
    def asks_others(self) -> bool:
        """Whether ranks compare what they have in a step; one that joins later, or steps alone, would ask nobody."""
        return self.elastic is None and not self.strategy.steps_alone

    @property
    def _setting(self) -> StepSetting:
        return StepSetting(self.strategy, self.precision, self.device, not self.asks_others)

    def _before_update(self) -> None:
        """Take the changes of the plan that are due; refuse what the strategy cannot follow."""
        self._trained.check()
        self._edited.check_params()
        if self.changes is not None:
            self.changes.before_update(self)
        if self.auto_optimization is not None:
            self.auto_optimization.before_update(self)

    def _begun(self) -> Update:
        if self.update is None:
            self._before_update()
            self._forget_gradients()
            self.update = Update()
        return self.update

    def _forget_gradients(self) -> None:
        """Those of an update that was given up, and what other losses have left in the parameters: a script's own, or
        that of another Engine, whose backward went through this model."""
        self.optimizer.zero_grad(set_to_none=True)

    def _sharded(self, loader: Iterable[Batch], order: DataOrder) -> Iterator[RankBatch]:
        divide = sharded if self.elastic is None else DividedBatches
        return divide(loader, order, part=self.strategy.data_rank, num_parts=self.strategy.data_degree)

    def _order(self) -> DataOrder:
        """From where on the next batches are read."""
        return DataOrder(
            seed=self.plan.training.seed,
            epoch=self.ledger.epoch,
            skip=self.ledger.num_batches,
            num_done=self.ledger.num_samples,
            position=self.ledger.position,
            is_exactly_once=self.plan.training.exactly_once,
            compares_ranks=self.asks_others,
            is_deterministic=self.plan.distributed.deterministic,
        )

    def _place(self) -> list[int]:
        return [process_group.rank(), process_group.world_size()]
