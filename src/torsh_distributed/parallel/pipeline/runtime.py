"""Runs a pipeline: stages on ranks, microbatches through them, the loss on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.agreement import end_together, fail_together
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.models.example_inputs import named_inputs, takes, without_cache
from torsh_distributed.parallel.models.label_share import own_loss, require_labels, shifts_labels
from torsh_distributed.parallel.models.probing import probing
from torsh_distributed.parallel.pipeline.forward import TiedGradients, run_stages, share_output
from torsh_distributed.parallel.pipeline.microbatches import Microbatched, numbers, padded, rows_in, shapes_of
from torsh_distributed.parallel.pipeline.schedule import (
    Action,
    Timeline,
    compute_timeline,
    make_schedule,
    stage_owners,
    stages_of_rank,
)
from torsh_distributed.parallel.pipeline.stages import StagePlan, split_into_stages
from torsh_distributed.parallel.pipeline.timed_stage import ActionRecorder, TimedStage
from torsh_distributed.parallel.pipeline.untraced.stage_clone import UntracedStage
from torsh_distributed.plan.sections.mesh import PipelineConfig

LossFn = Callable[[Any, Any], Tensor]
Wrap = Callable[[int, nn.Module], nn.Module]
"""From a stage's index and module to the module that runs instead."""


class PipelineParallel:
    """A model whose stages are on the ranks of a group; a step sends microbatches through them, forward and backward.

    Every rank of the group creates it, with the same model or plan. After `step` each rank has the gradients of its
    own stages, equal to those of the whole batch in the whole model; `module` holds their parameters, for an
    optimizer, under their names in the model. Parameters of other stages are freed.
    """

    def __init__(
        self,
        model: nn.Module | StagePlan,
        config: PipelineConfig,
        *,
        group: dist.ProcessGroup,
        loss_fn: LossFn | None = None,
        wrap: Wrap | None = None,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.config, self.group, self._context = config, group, context
        num_stages = group.size() * config.stages_per_rank
        self.plan = model if isinstance(model, StagePlan) else plan_stages(model, config, group.size())
        if len(self.plan.stages) != num_stages:
            raise ConfigurationError(
                f"{group.size()} ranks of {config.stages_per_rank} stages need {num_stages} stages,"
                f" but the model was cut into {len(self.plan.stages)}",
                hint="split the model into that many stages, or change pipeline.stages_per_rank",
            )
        self.stage_of = stage_owners(config, group.size())
        self.mine = stages_of_rank(config.schedule, group.rank(), num_ranks=group.size(), num_stages=num_stages)
        self.plan.drop_others(self.mine)
        self.built = {index: self.plan.build(index) for index in self.mine}
        """This rank's stages as cut, by index; `stage_modules` run instead of them."""
        self.stage_modules = {index: wrap(index, stage) if wrap else stage for index, stage in self.built.items()}
        for index, stage in self.built.items():
            self.plan.adopt(index, stage)
        self.recorder = ActionRecorder(group.rank())
        self.tied = TiedGradients(self.plan, self.stage_of, self.built, group)
        self.module = LocalStages(self.built, self._run_everywhere, names_here=self.tied.names_here)
        self.device = next((param.device for param in self.module.parameters()), torch.device("cpu"))
        self.loss_fn = loss_fn
        self._scale: Tensor | float = 1.0
        self.held = 1.0
        """The last step's gradients are those of its loss times this: what its microbatches count was not known."""
        self._counted: dict[int, Tensor] = {}
        """By microbatch: torch runs the first one once more when it first sees a batch of this shape."""
        self._count: Tensor | None = None
        self._schedule: Any = None
        self._shapes: Any = None
        self._has_own_loss = False
        self._measured: Timeline | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return 0 in self.mine

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return len(self.plan.stages) - 1 in self.mine

    def step(self, inputs: Any, targets: Any, *, scale: float = 1.0, weight: Tensor | float = 1.0) -> Tensor:
        """Run forward and backward of a batch, adding to the gradients; returns the mean loss, on every rank.

        Without a loss_fn the model computes the loss, from labels among its inputs; targets are None then.

        Every rank of the group passes the same batch (tensors that its stages do not use may be empty ones of the same
        length).
        Gradients are `scale` times those of the loss, which keeps small ones above zero in fp16; at 0 the loss is 0
        too. The loss, also the one returned, is `weight` times that of the batch: what this rank's part of split
        sequences stands for. It is in the loss from the start because backward through attention sends gradients to
        ranks with other weights.
        """
        self._require_loss(inputs)
        count, num_rows = self.config.num_microbatches, rows_in((inputs, targets))
        if num_rows < count:
            # The schedule has a fixed number of microbatches: those without a row repeat one that weighs nothing.
            inputs, targets = padded((inputs, targets), num_rows, count)
        arguments = self._load(inputs, targets, count, num_real=min(num_rows, count))
        kind = self.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        shapes = (shapes_of((inputs, targets)), precision)
        if self._schedule is None or shapes != self._shapes:
            # Torch fixes the shapes of what stages send when a schedule first runs.
            self._schedule = make_schedule(self.config, self._stages(), loss_fn=self._microbatch_loss)
            self._shapes = shapes
        losses: list[Tensor] = []
        self.recorder.take()
        self._scale = scale * weight
        self._counted = {}
        with events.phase("schedule"):
            with self._context(), self._waiting_for_each_other():
                # torch 2.11 accepts only contiguous inputs of the first stage.
                self._schedule.step(
                    *(map(_packed, arguments) if self.is_first else ()),
                    target=numbers(count, self.device) if self.is_last else None,
                    losses=losses if self.is_last else None,
                    return_outputs=False,
                )
            self._measured = None
            # A rank that finishes early waits here: this is the last part of the bubble.
            loss = self._share_loss(torch.stack(losses).detach().sum() / (scale or 1.0) if self.is_last else None)
        self.tied.sum()
        return loss / self.held

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> Tensor:
        """The loss of a batch of any size, or of one microbatch, on every rank, without gradients."""
        self._require_loss(inputs)
        out = self._forward(inputs, targets)
        targets = targets[0] if isinstance(targets, Microbatched) else targets
        with self._context(), self._waiting_for_each_other():
            loss = self._loss(out, targets) if self.is_last else None
        self._counted = {} if self._take is None or loss is None else {0: self._take()}
        return self._share_loss(loss)  # of one part: it is not held as another number

    @torch.no_grad()
    def forward(self, inputs: Any) -> Any:
        """The model's output for a batch of any size, on the last stage's rank; None on the others."""
        return self._forward(inputs, None)

    def _forward(self, inputs: Any, targets: Any) -> Any:
        arguments = self._load(inputs, targets, 1)
        with self._context(), self._waiting_for_each_other():
            out = run_stages(
                self.stage_modules, arguments, stage_of=self.stage_of, group=self.group, device=self.device
            )
        return self._whole_output(out) if self.is_last else None

    def _run_everywhere(self, *inputs: Any, **named: Any) -> Any:
        """The model's output for a batch of any size, on every rank."""
        out = self.forward({**named_inputs(self.plan.model, inputs), **named} if named else inputs)
        owner = self.stage_of[len(self.plan.stages) - 1]
        return share_output(out, owner, group=self.group, device=self.device)

    def measured_timeline(self) -> Timeline:
        """The last step as measured: all ranks' actions; every rank of the group calls this.

        Times are from each machine's monotonic clock: across nodes only differences within a rank are meaningful.
        """
        if self._measured is None:
            gathered = all_gather_object(
                [(one.stage, one.kind, one.microbatch, one.start, one.end) for one in self.recorder.actions],
                group=self.group,
            )
            self._measured = _timeline(gathered)
        return self._measured

    def computed_timeline(self) -> Timeline:
        """The step as the schedule plans it, with stages of equal cost."""
        return compute_timeline(self.config, self.group.size())

    def _waiting_for_each_other(self) -> AbstractContextManager[dist.ProcessGroup]:
        """A stage that raises sends nothing more: those that wait for it must learn why."""
        return end_together(f"run stage {' and '.join(map(str, self.mine))} of the pipeline", self.group)

    def _stages(self) -> list[TimedStage]:
        return [
            TimedStage(
                module,
                index,
                len(self.plan.stages),
                self.device,
                group=self.group,
                recorder=self.recorder,
                microbatches=self.plan.microbatches,
            )
            for index, module in self.stage_modules.items()
        ]

    def _microbatch_loss(self, output: Any, _: Tensor) -> Tensor:
        """The current microbatch's share of the loss, scaled; torch computes it right after the last stage has run."""
        parts, take = self.plan.microbatches, self._take
        loss = self._loss(self._whole_output(output), parts.targets)
        if take is None:
            return loss * (self._scale * parts.weight)
        count = take() * parts.is_real
        self._counted[parts.current] = count
        # As if all counted as much as the first, because its backward does not wait for the forward of the others.
        return loss * (self._scale * (count / self._assumed()).to(loss.dtype))

    @property
    def _take(self) -> Callable[[], Tensor] | None:
        counts = self.plan.microbatches.counts
        return None if counts is None else counts.take

    def _assumed(self) -> Tensor:
        first = next(iter(self._counted.values())) * self.config.num_microbatches
        return torch.where(first > 1e-6, first, 1.0)

    def take_count(self) -> Tensor | None:
        """What the last loss was a mean of, on every rank; None where its batch says it."""
        count, self._count = self._count, None
        return count

    def _loss(self, output: Any, target: Any) -> Tensor:
        loss = (
            own_loss(output, type(self.plan.model).__name__) if self.loss_fn is None else self.loss_fn(output, target)
        )
        # Split logits give a DTensor, equal on all ranks.
        whole: Tensor = whole_of(loss)
        # In fp16 the scaled loss would overflow.
        return whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole

    def _require_loss(self, inputs: Any) -> None:
        """Without a loss_fn the model computes its loss itself; raise InvalidArgument on every rank if it does not."""
        if self.loss_fn is not None or self._has_own_loss:
            return
        model = self.plan.model
        if self.plan.keeps_forward and takes(model, "labels"):
            require_labels(named_inputs(model, inputs), type(model).__name__)
            return
        with probing(self.module):
            out = self.forward(inputs)
        with fail_together("find the loss in what the model returns", self.group):
            if self.is_last:
                own_loss(out, type(model).__name__)
        self._has_own_loss = True

    def _whole_output(self, output: Any) -> Any:
        """The model's output, from what the last stage returned."""
        last = self.built[len(self.plan.stages) - 1]
        return last.forward_of_model.restored(output) if isinstance(last, UntracedStage) else output

    def _load(self, inputs: Any, targets: Any, count: int, *, num_real: int | None = None) -> tuple[Any, ...]:
        """Cut the batch into microbatches; returns what the first stage takes."""
        parts = self.plan.microbatches
        batch = inputs if self.loss_fn is None else (inputs, targets)
        if self.plan.is_chain:
            parts.load({"0": self._chain_input(inputs)}, targets, count, num_real=num_real, batch=batch)
            return ()
        if not self.plan.keeps_forward:
            arguments = self._arguments(inputs)
            named = {str(place): value for place, value in enumerate(arguments)}
            parts.load(named, targets, count, num_real=num_real, batch=batch)
            return arguments
        model = self.plan.model
        named = without_cache(model, named_inputs(model, inputs))
        parts.load(named, targets, count, num_real=num_real, batch=batch, shifts=shifts_labels(model))
        return ()

    def _chain_input(self, inputs: Any) -> Any:
        """What the first layer takes: the input, under its name, alone in a tuple, or a tuple of several."""
        if isinstance(inputs, Microbatched):
            return inputs
        if isinstance(inputs, list):
            return self._chain_input(tuple(inputs))
        is_wrapped = isinstance(inputs, Mapping) or (isinstance(inputs, tuple) and len(inputs) == 1)
        return self._arguments(inputs)[0] if is_wrapped else inputs

    def _arguments(self, inputs: Any) -> tuple[Any, ...]:
        names = self.plan.inputs or ()
        if isinstance(inputs, Mapping):
            missing, unknown = sorted(set(names) - set(inputs)), sorted(set(inputs) - set(names))
            if missing or unknown:
                raise InvalidArgument(
                    "the batch does not have the inputs that the pipeline was traced with",
                    hint="a pipeline cannot pass arguments of forward that have a default",
                    missing=missing or None,
                    unknown=unknown or None,
                )
            return tuple(inputs[name] for name in names)
        given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        if len(given) != len(names):
            raise InvalidArgument(
                f"forward takes {', '.join(names)}, but the batch has {len(given)} inputs",
                hint="pass as many inputs, in this order",
            )
        return given

    def _share_loss(self, loss: Tensor | None) -> Tensor:
        """The last stage's loss, on every rank, and what it counted."""
        last = dist.get_global_rank(self.group, self.stage_of[len(self.plan.stages) - 1])
        value = torch.zeros((), device=self.device) if loss is None else loss.detach().float().clone()
        self.held = 1.0
        if self._take is None:
            return broadcast(value, last, group=self.group)
        told = torch.zeros(3, dtype=torch.float64, device=self.device)
        if loss is not None:
            told = torch.stack([value.double(), torch.stack([*self._counted.values()]).sum(), self._assumed()])
        told = broadcast(told, last, group=self.group)
        self._count = told[1]
        self.held = float(told[1] / told[2]) or 1.0
        return told[0].float()


class LocalStages(nn.Module):
    """This rank's stages as one module: parameters and buffers under the names they have in the model."""

    is_part_of_model = True
    """Other parameters of the model are on other ranks."""

    def __init__(
        self, stages: Mapping[int, nn.Module], run: Callable[..., Any], *, names_here: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._run = run
        self.names_here = names_here
        """Names of a shared parameter in the model to its name here."""
        self._untraced = tuple(stage.forward_of_model for stage in stages.values() if isinstance(stage, UntracedStage))
        for stage in stages.values():
            _merge(self, stage)

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the stages of this rank have no {name!r}: under mesh.pp a rank holds the layers of its own stages"
                " and nothing of the model's class; look for it in named_modules() or named_parameters(), or change the"
                " model before parallelize()"
            ) from None

    @property
    def untraced_models(self) -> tuple[nn.Module, ...]:
        """The models whose own forward runs this rank's stages."""
        return tuple(forward.model for forward in self._untraced)

    @override
    def train(self, mode: bool = True) -> LocalStages:
        for forward in self._untraced:
            forward.train(mode)
        return super().train(mode)

    @override
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The whole model's output, on every rank; every rank calls this, and only without gradients."""
        if torch.is_grad_enabled():
            raise InvalidArgument(
                "a pipelined model can be called without gradients only: stages train in a schedule",
                hint="use torch.no_grad() to compute its output, PipelineParallel.step or Engine.step to train",
            )
        return self._run(*inputs, **named)


def plan_stages(
    model: nn.Module,
    config: PipelineConfig,
    num_ranks: int,
    *,
    example: Any = None,
    agree: Callable[[list[float]], list[float]] | None = None,
) -> StagePlan:
    """The stages that a plan's `pipeline` section asks for; `example`: see split_into_stages. `agree` is for
    `balance = "time"`."""
    return split_into_stages(
        model,
        num_ranks * config.stages_per_rank,
        balance=config.balance,
        split_points=config.split_points,
        example=example,
        agree=agree if config.balance == "time" else None,
    )


def _merge(into: nn.Module, module: nn.Module) -> None:
    """Add the children, parameters and buffers of `module` to `into`; containers with the same name are merged."""
    for name, child in module.named_children():
        if name not in into._modules:
            # The stage's graph makes its own containers; their contents are the model's.
            is_container = type(child) is nn.Module
            into.add_module(name, nn.Module() if is_container else child)
        if type(child) is nn.Module:
            _merge(into.get_submodule(name), child)
    for name, param in module.named_parameters(recurse=False):
        into.register_parameter(name, param)
    for name, buffer in module.named_buffers(recurse=False):
        into.register_buffer(name, buffer)


def _packed(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _timeline(gathered: Sequence[Sequence[Any]]) -> Timeline:
    actions = [
        Action(rank, stage, kind, microbatch, start, end)
        for rank, mine in enumerate(gathered)
        for stage, kind, microbatch, start, end in mine
    ]
    return Timeline(tuple(actions), len(gathered))
