"""Builds the Engine from a model, an optimizer and a plan, in the order the parts depend on each other."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from torsh_distributed import events, upward
from torsh_distributed.comm.agreement import fail_together, require_same
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.comm.meeting.software_versions import comparable, own_software
from torsh_distributed.errors import BackendNotInitialized, ConfigurationError, InvalidArgument
from torsh_distributed.observe.metrics.process_metrics import note_axes, note_fact
from torsh_distributed.parallel.choose import strategy_for
from torsh_distributed.parallel.compiling import Compiled
from torsh_distributed.parallel.data.lone_replicas import LoneReplicas
from torsh_distributed.parallel.data.synced_batch_norm import sync_batch_norms
from torsh_distributed.parallel.expert.autocast_stacks import cast_expert_stacks
from torsh_distributed.parallel.mesh.group_axes import GroupAxes
from torsh_distributed.parallel.mesh.layout import MeshLayout
from torsh_distributed.parallel.models.example_inputs import keep_no_cache_in_training
from torsh_distributed.parallel.models.materialize import ParamInit, is_on_meta
from torsh_distributed.parallel.models.same_model import check_same_model
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.parallel.torch_internals import tree_flatten
from torsh_distributed.parallel.weights.stored_weights import StoredWeights
from torsh_distributed.parallel.whole_tensors.optimizer_needs import refuse_closures
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.axis_rules import splits_model
from torsh_distributed.train.binding import (
    OptimizerFn,
    describe_optimizer,
    drop_unknown_kernels,
    prepare_optimizer,
    refuse_step_hooks,
)
from torsh_distributed.train.comparing.forward_changes import ForwardChanges
from torsh_distributed.train.efficiency.predicted_step import emit_prediction
from torsh_distributed.train.engine import Engine
from torsh_distributed.train.job_changes.automatic_plan import plan_of_job, warn_of_unread_plan
from torsh_distributed.train.job_changes.elastic_steps import SAME_SETTINGS_HINT, elastic_steps_for, with_elastic
from torsh_distributed.train.job_changes.running_changes import running_changes
from torsh_distributed.train.learning_rate import SchedulerFn
from torsh_distributed.train.loss import LossFn
from torsh_distributed.train.losses.loss_kind import check_coupled_samples
from torsh_distributed.train.parameters.averaged_models import explain_averages
from torsh_distributed.train.parameters.gradient_hooks import GradientHooks
from torsh_distributed.train.precision import cast_buffers
from torsh_distributed.train.speed.deferred_logits import DeferredHead, DeferredLogits, defer_logits, should_defer
from torsh_distributed.train.speed.float8 import use_float8
from torsh_distributed.train.speed.suggestions import (
    bf16_suggestion,
    missing_speedups,
    plan_suggestions,
    suggest_fused_loss,
    suggest_less_memory,
    suggestion_line,
)

if TYPE_CHECKING:
    from torsh_distributed.train.comparing.first_batch import FirstBatchComparison

_log = logging.getLogger(__name__)
_LARGE_BYTES = 2**32


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | OptimizerFn,
    plan: Plan | None = None,
    *,
    loss_fn: LossFn | None = None,
    scheduler_fn: SchedulerFn | None = None,
    param_init_fn: ParamInit | None = None,
    weights: str | Path | None = None,
    example: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> Engine:
    """Spread `model` over the world as the plan says and return the Engine that trains it; every rank calls this.

    `optimizer` holds the model's parameters, or is a function from parameters to an optimizer, called once the model
    has its final parameters. `loss_fn(outputs, targets)` is called with the model's output and the second half of each
    `(inputs, targets)` batch; without it the model is called with the whole batch and must return the loss.
    `scheduler_fn(optimizer)` makes a scheduler that is stepped after every update. `param_init_fn(module)` fills the
    modules of a model on the meta device that have no `reset_parameters()`; or `weights`, a safetensors file or a
    directory as Hugging Face writes it, is read into what each rank holds of such a model. `example` is a microbatch of
    inputs, as a tuple or by name: to measure layers on for `pipeline.balance = "time"`, to run a model once that
    cannot be traced into stages, and to plan for under `torsh run --plan auto`. Parameters and buffers become those of
    rank 0. Settings that this version does not support are refused here, before the first step.
    """
    chosen = with_elastic(plan or Plan())
    if not process_group.is_initialized():
        raise BackendNotInitialized("parallelize() needs the process group")
    if plan is None:
        warn_of_unread_plan()
    settings = _settings(chosen, optimizer, has_weights=weights is not None)
    require_same(settings, group=resolve_group(None), hint=SAME_SETTINGS_HINT)
    chosen = _plan_of_all(model, chosen, settings["optimizer"]["class"], example)
    optimizer_for = prepare_optimizer(model, optimizer)
    check_same_model(model)
    chosen = _with_recomputation(model, chosen, settings["optimizer"]["class"], example)
    _warn_of_memory(model, chosen, settings["optimizer"]["class"])
    emit_prediction(model, chosen, optimizer=settings["optimizer"]["class"], example=example)
    suggest_less_memory(model, chosen, optimizer=settings["optimizer"]["class"], example=example)
    num_passes = chosen.training.gradient_accumulation
    hooks = GradientHooks(model) if process_group.world_size() * num_passes > 1 else None
    stored = _stored_weights(model, weights, param_init_fn)
    keep_no_cache_in_training(model)
    _require_separate_loss(chosen, loss_fn)
    deferred = _prepare_for_speed(model, chosen)
    statistics = sync_batch_norms(model) if chosen.training.sync_batch_norm else None
    comparison = _comparison(model, chosen)
    strategy = strategy_for(model, chosen, param_init_fn=param_init_fn, weights=stored, example=example)
    made = _placed(optimizer_for(strategy.unwrapped), strategy, chosen)
    strategy.bind(made)
    if deferred is not None:
        made.register_step_post_hook(deferred.note_update)
    engine = Engine(strategy, made, chosen, loss_fn=_compiled(loss_fn, chosen), scheduler_fn=scheduler_fn)
    check_coupled_samples(strategy.whole_model, chosen, data_degree=strategy.data_degree)
    explain_averages(strategy, chosen)
    if statistics is not None:
        statistics.group = lambda: engine.strategy.samples_group
        statistics.is_borrowed = lambda: engine.loss.is_borrowed
    _agree_on_optimizer(engine)
    engine.comparison = comparison
    if hooks is not None:
        hooks.check(strategy, chosen)
        engine.gradient_hooks = hooks
    engine.settings = {**settings, "data": None}
    engine.elastic = elastic_steps_for(engine)
    engine.changes = running_changes()
    _let_optimize(engine)
    _suggest(engine)
    num_forwards = num_passes * (chosen.pipeline.num_microbatches if chosen.mesh.pp > 1 else 1)
    if strategy.data_degree * num_forwards > 1:
        engine.forward_changes = ForwardChanges(
            strategy.unwrapped,
            num_passes=num_forwards,
            asks_others=engine.asks_others,
            loss_fn=loss_fn,
            has_stages=chosen.mesh.pp > 1,
        )
    return engine


def _plan_of_all(model: nn.Module, plan: Plan, optimizer: str, example: Any) -> Plan:
    """The plan that all ranks train by, checked against the world, without "auto" in it; rank 0 tells its notices."""
    plan = plan_of_job(model, plan, optimizer=optimizer, example=example)
    plan.validate(process_group.world_size())
    if process_group.rank() == 0:
        for notice in plan.notices():
            _log.warning(notice)
    plan = plan.resolve(process_group.world_size())
    note_fact("mesh", plan.mesh.degrees)
    note_axes(GroupAxes(MeshLayout(plan.mesh)))
    note_fact("total_steps", plan.training.steps)
    return plan


def _require_separate_loss(plan: Plan, loss_fn: LossFn | None) -> None:
    if plan.training.gather_for_loss and loss_fn is None:
        raise ConfigurationError(
            "training.gather_for_loss needs a loss_fn: a model that computes its loss itself sees its own samples only",
            hint="return the outputs from the model, and pass loss_fn(outputs, targets) to parallelize()",
            key="training.gather_for_loss",
        )


def _prepare_for_speed(model: nn.Module, plan: Plan) -> DeferredHead | None:
    """Change the layers that the plan's precision computes otherwise; the deferred head, if there is one."""
    device = _device_of(model)
    cast_buffers(model, plan.precision)
    if plan.precision.dtype == "fp8":
        use_float8(model, plan.precision, device)
        if not (plan.compile.enabled or plan.precision.fp8_emulate) and process_group.rank() == 0:
            _log.warning("fp8 without compile.enabled is slower than bf16: its conversions are kernels of their own")
    if plan.precision.dtype in ("bf16", "fp8"):
        cast_expert_stacks(model)
    if not should_defer(model, plan, device):
        return None
    return defer_logits(model, stops_if_asked=plan.training.fused_loss == "auto")


def _placed(optimizer: Optimizer, strategy: Strategy, plan: Plan) -> Optimizer:
    """The optimizer with its state where the plan wants it: on the device, off it, or on servers."""
    refuse_step_hooks(optimizer, plan)
    drop_unknown_kernels(optimizer, plan)
    # Imported here, not above: offloading and servers are for few plans.
    if plan.offload.enabled:
        from torsh_distributed.parallel.offload.state_offload import offloaded_optimizer

        optimizer = offloaded_optimizer(strategy, optimizer, plan)
    refuse_closures(optimizer)
    if isinstance(strategy, LoneReplicas):
        from torsh_distributed.train.optimizers.served_plan import keep_together

        optimizer = keep_together(strategy, optimizer, plan)
    return optimizer


def _let_optimize(engine: Engine) -> None:
    """Have a running job try advice, if the plan asks for it."""
    training = engine.plan.training
    if training.auto_optimize != "off":
        # Here: what it imports is for jobs that ask for it.
        from torsh_distributed.train.job_changes.auto_optimization import AutoOptimizationEngine

        engine.auto_optimization = AutoOptimizationEngine(
            window=training.auto_optimize_window, allows_lossy=training.auto_optimize == "lossy"
        )


def _suggest(engine: Engine) -> None:
    """One line on rank 0 about what is known to pay on this GPU, and events of that and more for `torsh why`."""
    if process_group.rank() != 0:
        return
    found = list(missing_speedups(engine.plan, engine.unwrapped, engine.optimizer))
    if found:
        _log.warning(suggestion_line(found))
    if not events.wanted(events.SuggestionEvent):
        return
    product = bf16_suggestion(engine.plan, engine.device)
    for one in (*found, *plan_suggestions(engine.plan), *([product] if product is not None else [])):
        events.emit(one)
    suggest_fused_loss(engine.plan, engine.unwrapped, engine.device)


def _with_recomputation(model: nn.Module, plan: Plan, optimizer: str, example: Any) -> Plan:
    """Name the layers that are recomputed for a memory budget: rank 0 decides and all others get it."""
    if plan.activation.is_decided:
        return plan
    group, keys = resolve_group(None), None
    with fail_together("choose what to recompute", group):
        if process_group.rank() == 0:
            decide = upward.load(upward.RECOMPUTATION)
            name, device_type = optimizer.rpartition(".")[2], _device_of(model).type
            found = decide(model, plan, optimizer=name, device_type=device_type, example=example).activation
            keys = {"strategy": found.strategy, "every_n_layers": found.every_n_layers}
            keys |= {"whole_layers": found.whole_layers, "selective_layers": found.selective_layers}
    keys = broadcast_object(keys, 0)
    num_whole, num_cheap = len(keys["whole_layers"]), len(keys["selective_layers"])
    events.emit(
        events.DecisionEvent(
            subject="activation",
            choice=f"{keys['strategy']}: {num_whole} layers whole, {num_cheap} all but costly operations",
            reason=f"the least recomputation whose estimate is within {plan.activation.memory_budget_gb:g} GB",
        )
    )
    return plan.replace(activation=keys)


def _warn_of_memory(model: nn.Module, plan: Plan, optimizer: str) -> None:
    """Say on one rank, before anything is allocated, that the estimated memory is above the device's."""
    if process_group.rank() != 0:
        return
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and sum(param.nbytes for param in model.parameters()) < _LARGE_BYTES:
        return  # the trace would take longer than such a model takes to build
    try:
        num_local = process_group.local_world_size()
    except BackendNotInitialized:  # torch has brought the group up: which ranks share a node is unknown
        num_local = 1
    warning = upward.load(upward.MEMORY_WARNING)(
        model, plan, optimizer=optimizer.rpartition(".")[2], device=device, num_local=num_local
    )
    if warning is not None:
        _log.warning("%s", warning)


def _settings(plan: Plan, optimizer: Optimizer | OptimizerFn, *, has_weights: bool) -> dict[str, Any]:
    """What every rank must be started with alike, compared before any of them acts on its own."""
    software = own_software()
    return {
        "software": {name: comparable(name, value) for name, value in asdict(software).items()},
        "plan": _flat(plan.model_dump(mode="json")),
        "optimizer": describe_optimizer(optimizer),
        "weights": has_weights,
    }


def _agree_on_optimizer(engine: Engine) -> None:
    """Compare what a function has made of the optimizer and of its schedule; every rank calls this.

    A function may make other groups for the parameters of another pipeline stage.
    """
    names = [name for name, _ in engine.unwrapped.named_parameters()]
    has_groups = len(engine.optimizer.param_groups) > 1
    require_same(
        {
            "optimizer": describe_optimizer(engine.optimizer),
            "scheduler": engine.learning_rate.describe_scheduler(),
        },
        group=resolve_group(None),
        hint="build optimizer and scheduler from the same values on every rank",
        part=hashlib.sha256(repr(names).encode()).hexdigest() if has_groups else "",
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names, so that a difference can be named."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def _comparison(model: nn.Module, plan: Plan) -> FirstBatchComparison | None:
    """What compares a model that ranks hold parts of, or run on parts of sequences, with one process."""
    if not splits_model(plan) and plan.mesh.ep == 1:
        return None
    # Here, not above: it takes a second to import, and most plans do not ask for it.
    from torsh_distributed.train.comparing.first_batch import FirstBatchComparison

    return FirstBatchComparison(model, plan)


def _device_of(model: nn.Module) -> torch.device:
    """Where the model will compute: a model on the meta device moves to this rank's."""
    return process_group.device() if is_on_meta(model) else next(model.parameters()).device


def _compiled(loss_fn: LossFn | None, plan: Plan) -> LossFn | None:
    """The loss as one graph with its cast to fp32, where it gets whole logits of this rank alone."""
    config = plan.compile
    if loss_fn is None or not config.enabled or splits_model(plan):
        return loss_fn
    compiled = Compiled(loss_fn, config, label=f"the loss ({getattr(loss_fn, '__name__', type(loss_fn).__name__)})")
    if plan.training.fused_loss is False:
        return compiled

    def loss_of_logits(outputs: Any, targets: Any) -> Any:
        is_deferred = any(isinstance(one, DeferredLogits) for one in tree_flatten(outputs)[0])
        return (loss_fn if is_deferred else compiled)(outputs, targets)

    return loss_of_logits


def _stored_weights(model: nn.Module, path: str | Path | None, init_fn: ParamInit | None) -> StoredWeights | None:
    """The weights at `path`, checked against the model."""
    if path is None:
        return None
    if not all(param.is_meta for param in model.parameters()):
        raise InvalidArgument(
            "weights are for a model on the meta device, and this one has values already",
            hint='build it under torch.device("meta"), or leave weights out',
        )
    return StoredWeights(model, path, init_fn=init_fn)
