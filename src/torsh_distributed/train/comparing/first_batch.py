"""Runs a split model and the whole one on a few rows of the first batch, and refuses a split that computes otherwise.

Plans are made by looking at modules and by running a few of them; what a model, its loss and its data do together only
a run of all of it shows. Loss and gradients are compared, through the same path as in a step, and nothing is left
behind: parameters, buffers, gradients and random numbers are what they were.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torsh_distributed.checkpoint.random_generators import random_state, restore_random_state
from torsh_distributed.comm.collectives.objects import all_gather_object, broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import TorshError
from torsh_distributed.parallel.compiling import uncompiled
from torsh_distributed.parallel.composed.split_check import naming
from torsh_distributed.parallel.expert.layer import moe_layers
from torsh_distributed.parallel.models.materialize import is_on_meta
from torsh_distributed.parallel.models.probing import probing
from torsh_distributed.parallel.random_streams import draw_own_numbers
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.parallel.torch_internals import _BatchNorm, tree_flatten, tree_leaves, tree_unflatten
from torsh_distributed.plan import Plan
from torsh_distributed.train.batches import Batch
from torsh_distributed.train.comparing.module_trail import Passage, first_difference, trail_of
from torsh_distributed.train.comparing.refusal import Difference, refusal
from torsh_distributed.train.comparing.small_batch import num_ignored, repeated, small_batch, with_padding
from torsh_distributed.train.comparing.whole_copy import WholeCopy
from torsh_distributed.train.loss import LossFn
from torsh_distributed.train.losses.engine_loss import EngineLoss, StepSetting
from torsh_distributed.train.losses.watched_loss import WatchedLoss
from torsh_distributed.train.precision import Precision
from torsh_distributed.train.speed.attention_kernel import attending_with

_log = logging.getLogger(__name__)

_ROUNDING, _HALF_ROUNDING = 1e-3, 0.3
"""Of a gradient's norm; half precision may also send a token to another expert."""
_FLOOR, _HALF_FLOOR = 1e-5, 2e-2
"""Of the norm of all gradients: what a gradient that is zero but for rounding may differ by."""
_ROWS = 2


@dataclass(frozen=True)
class _Setup:
    """What a step runs with."""

    loss: EngineLoss
    setting: StepSetting

    @property
    def strategy(self) -> Strategy:
        return self.setting.strategy

    @property
    def precision(self) -> Precision:
        return self.setting.precision

    @property
    def loss_fn(self) -> LossFn | None:
        """The loss of one process; of `(sum, count)` the mean."""
        return None if self.loss.loss_fn is None else WatchedLoss(self.loss.loss_fn)


@dataclass
class _Answer:
    """What the whole model found on the first rank; plain values, for all ranks."""

    why_not: str | None
    """Why it could not run."""
    loss: float = 0.0
    in_training: bool = True
    """Else in evaluation mode, because it draws random numbers."""
    in_precision: bool = False
    """In the plan's precision: it cannot run outside of it."""
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """Of the parameters that have a gradient, by name."""
    tensors: list[Tensor] | None = None
    """The batch it ran on."""
    reads: Mapping[str, tuple[int, ...]] | None = None
    """Shapes of the parameters that the loss itself reads, by name."""
    changed: Mapping[str, Tensor] | None = None
    """What forward left in the buffers that it changes, by name."""
    moved: Sequence[str] = ()
    """Parameters and numbers that forward changes."""


class FirstBatchComparison:
    """Made of a model before it is split; `run` compares. Every rank does both."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._plan, self._kind = plan, type(model).__name__
        self._classes = {plain_name(name): type(module).__name__ for name, module in model.named_modules()}
        self._has_experts = bool(moe_layers(model))
        self._why_not: str | None = None
        self._whole: WholeCopy | None = None
        if self._has_experts and plan.mesh.pp > 1 and plan.pipeline.num_microbatches > 1:
            self._why_not = "its experts count load and capacity by microbatch"
        elif self._has_low_shards and max(plan.mesh.tp, plan.mesh.pp, plan.mesh.ep) > 1:
            self._why_not = f"its shards compute in {plan.precision.dtype}"
        elif plan.mesh.shard > 1 and plan.fsdp.gather_codec != "none":
            self._why_not = f"its shards are gathered in {plan.fsdp.gather_codec}"
        elif plan.compress.method != "none":
            self._why_not = "its gradients are compressed, which no comparison may begin"
        elif is_on_meta(model):
            self._why_not = "it is built on the meta device, so no rank has had all of it"
        elif plan.training.sync_batch_norm:
            self._why_not = "ranks communicate in its batch norms"
        elif plan.offload.enabled:
            self._why_not = "offload keeps a part of it elsewhere"
        elif process_group.rank() == 0:
            try:
                self._whole = WholeCopy(model)
            except Exception as error:
                # Its own modules are copied here, and may raise anything.
                self._why_not = f"it cannot be copied ({_said(error)})"

    def run(self, loss: EngineLoss, setting: StepSetting, batch: Batch) -> None:
        """Raise ConfigurationError on every rank unless the split model computes what the whole one does on `batch`.

        Where it cannot be compared, the first rank warns.
        """
        try:
            why_not = self._compare(_Setup(loss, setting), batch)
        finally:
            self._whole = None
        if why_not is not None and process_group.rank() == 0:
            _log.warning("%s is trained without being compared with one process first: %s", self._kind, why_not)

    def _compare(self, setup: _Setup, batch: Batch) -> str | None:
        strategy = setup.strategy
        device = setup.setting.device
        why_not = self._why_not
        rows, ignored = None, 0
        if setup.loss.is_collective:
            why_not = why_not or "ranks communicate in its loss"
        elif self._whole is not None and _lacks_memory(self._whole.num_bytes, device):
            why_not = why_not or "there is no memory for all of it on one rank"
        try:
            num_rows = self._plan.pipeline.num_microbatches if self._plan.mesh.pp > 1 else _ROWS
            rows = small_batch(batch, num_rows=num_rows, cp=self._plan.mesh.cp)
            ignored = num_ignored(rows)
        except Exception as error:
            why_not = why_not or f"no rows could be taken from its batch ({_said(error)})"
        said: list[tuple[str | None, int]] = all_gather_object([why_not, ignored])
        if any(reason for reason, _ in said):
            return next(reason for reason, _ in said if reason)
        # Rows without a label show nothing; another rank may have some with.
        leaves, spec = tree_flatten(rows)
        giver = min(range(len(said)), key=lambda rank: said[rank][1])
        if giver != 0:
            leaves = _with_tensors(leaves, broadcast_object(_tensors(leaves), giver), device)
            rows = tree_unflatten(leaves, spec)
        for name, value in strategy.whole_tensors():
            if self._whole is not None:
                self._whole.put(name, value)
        state = random_state()
        with uncompiled(), attending_with(self._plan.training.attention):
            try:
                answer: _Answer = _Answer(**broadcast_object(vars(self._ask(setup, rows)), 0))
                if answer.why_not is not None:
                    return answer.why_not
                if strategy.model.training and not answer.in_training:
                    draw_own_numbers(strategy.unwrapped)
                leaves = _with_tensors(leaves, answer.tensors or (), device)
                self._run_split(setup, batch, tree_unflatten(leaves, spec), answer)
            finally:
                restore_random_state(state)
        return None

    def _ask(self, setup: _Setup, rows: Batch) -> _Answer:
        """What the whole model computes; on the first rank."""
        whole, loss_fn = self._whole, setup.loss_fn
        if whole is None:
            return _Answer(None)
        if whole.model.training != setup.strategy.model.training:
            whole.model.train(setup.strategy.model.training)
        padded = with_padding(rows, whole.model, setup.loss.loss_fn)
        whole.stand_in_for(_state(setup.strategy))
        said = ""
        for chosen in (padded, rows):
            for in_precision in (True,) if self._has_low_shards else (False, True):
                if chosen is None:
                    continue
                try:
                    with setup.loss.unchanged(), setup.precision.computing() if in_precision else nullcontext():
                        loss, in_training = self._run_whole(whole, repeated(chosen, self._times(setup)), loss_fn)
                except Exception as error:
                    # The model's own code runs here; if it is at fault, the step will say so.
                    said = _said(error)
                    continue
                if not all(map(math.isfinite, (loss, *(float(one.norm()) for one in whole.gradients().values())))):
                    said = f"a loss of {loss:g}, or a gradient of it, is not finite"
                    continue
                shapes = {name: tuple(grad.shape) for name, grad in whole.gradients().items()}
                tensors = _tensors(tree_leaves(chosen))
                changed = {name: value.cpu() for name, value in whole.changed.items()}
                return _Answer(
                    None, loss, in_training, in_precision, shapes, tensors, whole.reads, changed, whole.moved
                )
        return _Answer(f"the whole model does not run on its first batch ({said})")

    @property
    def _has_low_shards(self) -> bool:
        """Whether shards are gathered in a lower precision: layers then run in it, or not at all."""
        return self._plan.mesh.shard > 1 and self._plan.precision.dtype != "fp32"

    def _times(self, setup: _Setup) -> int:
        """How often the whole model gets the rows: experts count load and capacity over what all ranks have."""
        return setup.strategy.data_degree if self._has_experts else 1

    def _run_whole(self, whole: WholeCopy, rows: Batch, loss_fn: LossFn | None) -> tuple[float, bool]:
        """The loss, and whether in training mode: not if that draws random numbers, as dropout does."""
        before = random_state()
        with probing(whole.model):
            _leave_statistics(whole.model)
            loss = whole.run(rows, loss_fn)
            if not whole.model.training or _is_same(before, random_state()):
                return loss, whole.model.training
        with probing(whole.model):
            whole.model.eval()
            return whole.run(rows, loss_fn), False

    def _run_split(self, setup: _Setup, batch: Batch, rows: Batch, answer: _Answer) -> None:
        params = _state(setup.strategy)
        in_parts = [
            name
            for name, shape in (answer.reads or {}).items()
            if params[name].is_meta or tuple(params[name].shape) != tuple(shape)
        ]
        read = next(filter(None, all_gather_object(in_parts[0] if in_parts else None)), None)
        if read is not None:
            raise refusal(self._kind, self._plan, Difference("reads", read))
        with self._as_before(setup, answer):
            # With all rows: the few that are compared may have no label.
            setup.loss.kind(setup.setting, batch)
            loss = self._step(setup, rows, answer)
            self._warn_of_statistics(setup.strategy, answer)
            difference = self._difference(setup, params, loss, answer)
        if difference is None:
            return
        with self._as_before(setup, answer):  # again: a forward may count its calls
            found = self._located(setup, rows, answer)
        if isinstance(found, str):
            _log.warning("%s", found)
        else:
            raise refusal(self._kind, self._plan, found or difference)

    def _step(self, setup: _Setup, rows: Batch, answer: _Answer) -> float:
        """Forward and backward as in a step; the mean loss. Gradients are in the parameters."""
        strategy, loss = setup.strategy, setup.loss
        running: list[str] = []
        try:
            weights = loss.begin(setup.setting, rows, [(rows, 1.0)], evenness=None, is_again=False)
            strategy.expect_scale(weights.before(0))
            with strategy.accumulating(is_last=True), naming(strategy.unwrapped, running), _computing(setup, answer):
                value = loss.compute(strategy, strategy.model, loss.guarded(rows, is_counted=weights.is_counted))
            weighted = value * weights.after(0, loss.take_count())
            mean = strategy.mean_loss(weighted.detach())
            with strategy.accumulating(is_last=True):
                strategy.before_backward(weighted)
                weighted.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        except TorshError:
            raise
        except Exception as error:
            # The model's own code runs here, on pieces of what it expects: it may raise anything.
            where = plain_name(running[-1]) if running else ""
            raise refusal(self._kind, self._plan, Difference("failed", where, said=_said(error))) from error
        finally:
            loss.forget_total()
        return mean.wait()

    def _difference(
        self, setup: _Setup, params: Mapping[str, Tensor], loss: float, answer: _Answer
    ) -> Difference | None:
        """Whether loss or gradients differ, the same answer on every rank."""
        rounding, floor = (_HALF_ROUNDING, _HALF_FLOOR) if self._is_rough(params, answer) else (_ROUNDING, _FLOOR)
        # Sums are over the rows of all ranks, and each of them has the same.
        times = setup.strategy.data_degree if setup.loss.is_sum and not self._has_experts else 1
        expected = {} if self._whole is None else {name: times * one for name, one in self._whole.gradients().items()}
        wanted_loss = times * answer.loss
        total = torch.stack([grad.double().norm() for grad in expected.values()]).norm() if expected else 0.0
        found: Difference | None = None
        if not abs(loss - wanted_loss) <= rounding * abs(wanted_loss) / 3 + 1e-6:
            found = Difference("loss", found=loss, expected=wanted_loss)
        mixed: str | None = None
        for name in answer.shapes or {}:
            param = params[name]
            grad = param.grad
            if isinstance(grad, DTensor) and not isinstance(param, DTensor):
                mixed = mixed or name
            held = torch.zeros_like(param) if grad is None else grad.to_dense() if grad.is_sparse else grad
            whole = setup.strategy.whole_gradient(name, held)
            if name in expected and found is None:
                wanted = expected[name].double()
                difference = (whole.double() - wanted).norm()
                if not difference <= rounding * wanted.norm() + floor * total:
                    found = Difference("gradient", name, found=float(whole.norm()), expected=float(wanted.norm()))
        if found is None and mixed is not None:
            found = Difference("mixed", mixed)
        said = broadcast_object(None if found is None else vars(found), 0)
        return None if said is None else Difference(**said)

    def _warn_of_statistics(self, strategy: Strategy, answer: _Answer) -> None:
        """Buffers that forward changes do not show in this loss, but may in a later one, and in checkpoints."""
        held = {plain_name(name): value for name, value in strategy.whole_model.named_buffers()}
        mine = [
            name
            for name, value in (answer.changed or {}).items()
            if not held[name].is_meta and not torch.allclose(held[name].cpu(), value, rtol=_ROUNDING, atol=1e-6)
        ]
        norms = [name for name, one in strategy.unwrapped.named_modules() if _is_batch_norm(one)]
        splits = self._plan.mesh.cp > 1 or (self._plan.mesh.pp > 1 and self._plan.pipeline.num_microbatches > 1)
        everyone = all_gather_object([mine[:1], norms[:1] if splits else []])
        changed = next((names[0] for names, _ in everyone if names), None)
        batch_norm = next((names[0] for _, names in everyone if names), None)
        if answer.moved and self._plan.mesh.pp > 1 and process_group.rank() == 0:
            _log.warning(
                "%s: forward changes %s, which a pipeline does for each microbatch, or not at all: losses that depend"
                " on it differ from those of one process; change it after the step",
                self._kind,
                ", ".join(answer.moved[:3]),
            )
        what = "a rank's positions" if self._plan.mesh.cp > 1 else "a microbatch"
        if process_group.rank() == 0 and (changed is not None or batch_norm is not None):
            _log.warning(
                "%s: %s has the statistics of %s, not of the whole batch as in one process; a norm of each sample"
                " (LayerNorm, GroupNorm) has no such difference",
                self._kind,
                plain_name(batch_norm or changed or ""),
                what,
            )

    def _is_rough(self, params: Mapping[str, Tensor], answer: _Answer) -> bool:
        dtypes = {param.dtype for param in params.values() if param.is_floating_point()}
        precision = self._plan.precision
        return (
            answer.in_precision
            or not dtypes <= {torch.float32, torch.float64}
            or precision.dtype == "fp8"
            or precision.reduce_dtype not in ("same", "fp32")
            or torch.backends.cuda.matmul.allow_tf32
        )

    def _located(self, setup: _Setup, rows: Batch, answer: _Answer) -> Difference | str | None:
        """The first module that differs; or, if the whole model does not give the same twice, that it does not."""
        whole, strategy = self._whole, setup.strategy
        expected: list[Passage] = []
        again = answer.loss
        if whole is not None:
            with probing(whole.model), trail_of(whole.model, cp=self._plan.mesh.cp) as expected, torch.no_grad():
                if not answer.in_training:
                    whole.model.eval()
                _leave_statistics(whole.model)
                with _computing(setup, answer):
                    again = float(whole.loss(repeated(rows, self._times(setup)), setup.loss_fn))
        if broadcast_object(abs(again - answer.loss) > 1e-3 * abs(answer.loss), 0):
            return f"{self._kind} computes something else each time, so it cannot be compared with one process"
        with trail_of(strategy.unwrapped) as seen, torch.no_grad(), _computing(setup, answer):
            setup.loss.compute(strategy, strategy.unwrapped, rows)
        everyone = [Passage(*one) for theirs in all_gather_object([list(one) for one in seen]) for one in theirs]
        split = [one._replace(shape=tuple(one.shape)) for one in everyone]
        place = first_difference(expected, split)
        said = broadcast_object(None if place is None else [place.module, place.is_output], 0)
        if said is None:
            return None
        name, is_output = said
        # What enters a module differs: the module around it has computed that. Lists compute nothing.
        where = name if is_output else name.rpartition(".")[0]
        while self._classes.get(where) in ("ModuleList", "ModuleDict"):
            where = where.rpartition(".")[0]
        return Difference("module", where, said=self._classes.get(where, self._kind), is_leaf=self._is_leaf(where))

    def _is_leaf(self, name: str) -> bool:
        return bool(name) and not any(other.startswith(f"{name}.") for other in self._classes)

    @contextmanager
    def _as_before(self, setup: _Setup, answer: _Answer) -> Iterator[None]:
        """Around the split model's run: modes as for the whole one; afterwards everything is as it was."""
        strategy = setup.strategy
        strategy.reshard()  # what a forward has gathered is freed in between, and cannot be written back
        params = list(strategy.unwrapped.parameters())
        grads = [param.grad for param in params]
        with ExitStack() as stack:
            stack.callback(strategy.take_comm_s)
            stack.enter_context(setup.loss.unchanged())
            for module in (strategy.unwrapped, *getattr(strategy.unwrapped, "untraced_models", ())):
                stack.enter_context(probing(module, keeps_params=module is strategy.unwrapped))
                if not answer.in_training:
                    for one in module.modules():
                        one.training = False
                _leave_statistics(module)
            for param in params:
                param.grad = None
            try:
                yield
            finally:
                strategy.reshard()
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad


def _state(strategy: Strategy) -> dict[str, Tensor]:
    """The model's parameters and buffers as this rank holds them, by name."""
    return {plain_name(name): value for name, value in strategy.whole_model.state_dict(keep_vars=True).items()}


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf.cpu() for leaf in leaves if isinstance(leaf, Tensor)]


def _with_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor], device: torch.device) -> list[Any]:
    """The leaves of a batch with other tensors, in their order."""
    given = iter(tensors)
    return [next(given).to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _computing(setup: _Setup, answer: _Answer) -> Any:
    return setup.precision.computing() if answer.in_precision else nullcontext()


def _leave_statistics(model: nn.Module) -> None:
    """Let batch norms use the statistics they have: those of a few rows are not those of a batch."""
    for module in model.modules():
        if _is_batch_norm(module):
            module.training = False


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same_host = torch.equal(one["cpu"], other["cpu"])
    return same_host and all(torch.equal(a, b) for a, b in zip(one["cuda"], other["cuda"], strict=True))


def _lacks_memory(num_bytes: int, device: torch.device) -> bool:
    """Whether a GPU has no room for all parameters, their gradients and as much for activations."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 3 * num_bytes > free + unused


def _said(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
