"""The model of a plain loop: when its forward and backward run, its loss, its batch, and the arithmetic of a step.

Nobody says which module the model is. So during one early step every module that is called is looked at, and the
outermost ones are kept: from then on only they have hooks. Those cost some 0.3 ms of a step, so short steps have them
now and then (`StepSampling`), not always.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torsh_distributed.comm.recording.flight_recorder import recorder
from torsh_distributed.events import step_notes

if TYPE_CHECKING:
    import torch

    from torsh_distributed.observe.loops.counted_operations import CountedOperations

_log = logging.getLogger(__name__)
_MAX_MODELS = 8
_MAX_LOSS_DEPTH = 2
_SHORTEST_WAIT_S = 20e-6

Counted = Callable[[int, float | None], None]
"""Told the operations of a step on this rank, and the peak of its device per second if it is known."""


def _harmless(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that never raises into training: what goes wrong is logged once, and the watch stops looking."""

    @functools.wraps(method)
    def guarded(self: ModelWatch, *args: Any) -> None:
        if self.is_broken:
            return
        try:
            method(self, *args)
        except Exception:
            self.is_broken = True
            _log.warning("the model of this loop is not watched; training goes on", exc_info=True)

    return guarded


class ModelWatch:
    """Hooks on the modules that a loop calls. `end_step` is called in the training thread after every update."""

    def __init__(self, on_counted: Counted, on_averaged_group: Callable[[str], None]) -> None:
        """`on_averaged_group` is told the group of torch's DDP, if its operations are recorded."""
        self._on_counted = on_counted
        self._on_averaged_group = on_averaged_group
        self._handles: list[Any] = []
        self._places: list[tuple[dict[int, Any], int, Any]] = []
        self._is_hooked = False
        self._is_looking = False
        self._kept: list[tuple[Any, ModuleFacts]] = []
        self._thread = 0
        self._depth = 0
        self._started_s = 0.0
        self._backward_s = 0.0
        self._gradients_s = self._gradients_cpu_s = 0.0
        self._ddp_group: str | None = None
        self._count: CountedOperations | None = None
        self._num_flops = 0
        self._is_counting = False
        self._device: torch.device | None = None
        self._models: list[Any] = []
        self._losses: list[Any] = []
        self._loss: Any = None
        self._num_samples: int | None = None
        self.is_broken = False
        """Whether something went wrong in a hook and it stopped looking."""
        self.has_phases = True
        """Whether phases are emitted; an Engine emits its own."""

    @property
    def needs_every_step(self) -> bool:
        """Whether some waits of a step are seen by the hooks alone: DDP over a group that our recorder does not see."""
        return any(facts.has_hidden_waits for _, facts in self._kept)

    def end_step(self, num_steps: int, *, watches_next: bool) -> tuple[float | None, int | None]:
        """`num_steps` updates are done: loss and samples over all replicas of the last one, as far as they were seen.

        Not called after every step; `watches_next` says whether the next one is seen.
        """
        self._thread = threading.get_ident()
        if self._is_counting and self._num_flops:
            from torsh_distributed.observe.loops.counted_operations import known_peak  # imports torch

            self._on_counted(self._num_flops, known_peak(self._device) if self._device is not None else None)
        self._is_counting, self._num_flops, self._depth = False, 0, 0
        if self.is_broken:
            self._end_count()
            self.remove()
            return None, None
        if self._is_looking:
            self._keep_models()
        elif not self._kept and _is_power_of_ten(num_steps) and not _compiles():
            self._look()
        elif self._kept:
            # Batches may change their shape, so operations are counted again now and then.
            self._is_counting = _is_power_of_ten(num_steps) and not _compiles()
        if self._kept:
            self._hook(is_wanted=watches_next or self._is_counting)
        loss, self._loss = self._loss, None
        num_samples, self._num_samples = self._num_samples, None
        return _number(loss), num_samples

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._places, self._is_hooked = [], [], False

    # Looking for the model

    def _look(self) -> None:
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        self._is_looking = self._is_counting = True
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    @_harmless
    def _enter(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._depth += 1
        if self._depth == 1:
            self.before_forward(module, args)

    @_harmless
    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        facts = _facts_of(module)
        self.after_forward(facts, args, output)
        if _first_tensor(output, _needs_gradient) is None:
            return
        kept = self._models if facts.has_params else self._losses
        if not any(one is module for one in kept) and len(kept) < _MAX_MODELS:
            kept.append(module)

    def _keep_models(self) -> None:
        """The step of looking is over: hooks go to what was found, and to nothing else."""
        self.remove()
        self._is_looking = False
        models, self._models = self._models, []
        losses, self._losses = self._losses, []
        self._kept = [(module, _facts_of(module)) for module in [*models, *losses]] if models else []
        for _, facts in self._kept:
            if facts.is_recorded and facts.ddp_group is not None:
                self._on_averaged_group(facts.ddp_group)

    def _hook(self, *, is_wanted: bool) -> None:
        """Watch what was found in the next step, or leave it alone: then torch calls the modules without a detour."""
        if is_wanted == self._is_hooked:
            return
        self._is_hooked = is_wanted
        if is_wanted and not self._handles:
            for module, facts in self._kept:
                before, after = _BeforeForward(self), _AfterForward(self, facts)
                handles = (
                    module.register_forward_pre_hook(before),
                    module.register_forward_hook(after, always_call=True),
                )
                self._handles += handles
                self._places += [
                    (module._forward_pre_hooks, handles[0].id, before),
                    (module._forward_hooks, handles[1].id, after),
                ]
            return
        # By torch's own dictionaries: to register and remove them every few steps costs as much as the hooks.
        for hooks, number, hook in self._places:
            if is_wanted:
                hooks[number] = hook
            else:
                hooks.pop(number, None)

    # What a model does

    @_harmless
    def before_forward(self, module: Any, args: Any) -> None:
        """A module of the loop is called."""
        if threading.get_ident() != self._thread:
            return
        self._started_s = time.monotonic()
        if self._is_counting:
            self._begin_count(module)

    @_harmless
    def after_forward(self, facts: ModuleFacts, args: Any, output: Any) -> None:
        """It has returned, or raised."""
        if threading.get_ident() != self._thread:
            return
        if self._count is not None:
            self._end_count()
        if not self.has_phases:
            return
        step_notes.note_phase("forward", self._started_s, time.monotonic())
        loss = _first_tensor(output, _is_loss)
        if loss is not None:
            self._loss = loss.detach()
        if not facts.has_params:
            return
        seen = loss if loss is not None else _first_tensor(output, _needs_gradient)
        if seen is not None and seen.grad_fn is not None:
            seen.grad_fn.register_prehook(self._begin_backward)
            self._ddp_group = facts.ddp_group
            if facts.num_replicas is not None:
                batch = _first_tensor(args, _has_rows)
                num_rows = 0 if batch is None else batch.shape[0] * facts.num_replicas
                self._num_samples = (self._num_samples or 0) + num_rows or None

    def _begin_count(self, module: Any) -> None:
        import torch

        from torsh_distributed.observe.loops.counted_operations import CountedOperations

        first = next(module.parameters(), None)
        if not torch.is_grad_enabled():
            return
        if first is not None:
            self._device = first.device
        self._count = CountedOperations()
        self._count.__enter__()  # type: ignore[no-untyped-call]

    def _end_count(self) -> None:
        count, self._count = self._count, None
        if count is not None:
            count.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._num_flops += count.num_flops

    @_harmless
    def _begin_backward(self, gradients: Any) -> None:
        import torch

        self._backward_s = time.monotonic()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_backward)

    @_harmless
    def _end_backward(self) -> None:
        """All gradients are there. DDP is called back next, and waits for its last bucket."""
        if self._ddp_group is None:
            self._note_backward()
            return
        import torch

        self._gradients_s, self._gradients_cpu_s = time.monotonic(), time.thread_time()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end_averaging)

    @_harmless
    def _end_averaging(self) -> None:
        """DDP has its averages: a wait in C++, which no backend sees."""
        now_s = time.monotonic()
        last = recorder.last(self._ddp_group or "")
        if now_s - self._gradients_s > _SHORTEST_WAIT_S:
            step_notes.note_wait(
                "all_reduce",
                self._ddp_group or "",
                self._gradients_s,
                now_s,
                (self._gradients_cpu_s, time.thread_time()),
                sequence=last.sequence if last is not None else None,
            )
        self._note_backward()

    def _note_backward(self) -> None:
        started_s, self._backward_s = self._backward_s, 0.0
        if started_s:
            step_notes.note_phase("backward", started_s, time.monotonic())


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What every step would find out again about a module."""

    has_params: bool
    ddp_group: str | None
    is_recorded: bool
    """Whether DDP's operations are in our flight recorder: then the end of its last one is known without hooks."""
    has_hidden_waits: bool
    """Whether DDP waits on the host for operations that are not in it. On a GPU streams wait, and the host goes on."""
    num_replicas: int | None


def _facts_of(module: Any) -> ModuleFacts:
    first = next(module.parameters(), None)
    group = _ddp_group(module)
    is_recorded = group is not None and any(one.is_by_torch and one.group == group for one in recorder)
    has_hidden_waits = group is not None and not is_recorded and first is not None and first.device.type == "cpu"
    return ModuleFacts(first is not None, group, is_recorded, has_hidden_waits, _num_replicas(module))


class _ForwardHook:
    """A hook that a copy or a file of the module does not need us for: there it becomes a log line that says nothing.

    Modules are deep-copied (averages of weights) and saved whole with torch.save; hooks go along with them.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self.watch = watch

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (logging.getLogger("torsh.forward").debug, "")


class _BeforeForward(_ForwardHook):
    def __call__(self, module: Any, args: Any) -> None:
        self.watch.before_forward(module, args)


class _AfterForward(_ForwardHook):
    def __init__(self, watch: ModelWatch, facts: ModuleFacts) -> None:
        super().__init__(watch)
        self._facts = facts

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.watch.after_forward(self._facts, args, output)


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"


def _compiles() -> bool:
    """Whether torch.compile is in use: hooks and modes would make it compile again, which takes longer than a step."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and bool(counters.get("frames"))


def _first_tensor(value: Any, fits: Callable[[torch.Tensor], bool]) -> torch.Tensor | None:
    """The first tensor that fits, in a tensor or a shallow collection of them."""
    import torch

    if isinstance(value, torch.Tensor):
        return value if fits(value) else None
    for one in _flat(value, 0):
        if isinstance(one, torch.Tensor) and fits(one):
            return one
    return None


def _flat(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        if depth < _MAX_LOSS_DEPTH:
            yield from _flat(one, depth + 1)


def _is_loss(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.requires_grad and tensor.is_floating_point()


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad


def _has_rows(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0


def _number(loss: Any) -> float | None:
    """The loss, unless reading it would wait for a device."""
    return float(loss) if loss is not None and loss.device.type == "cpu" else None


def _ddp_group(module: Any) -> str | None:
    """The name of the group that torch's DDP averages over; None for another module."""
    if type(module).__name__ != "DistributedDataParallel":
        return None
    name = getattr(getattr(module, "process_group", None), "group_name", None)
    return name if isinstance(name, str) else None


def _num_replicas(module: Any) -> int | None:
    """How many ranks train on other samples: known for DDP, and for a process alone."""
    import torch.distributed as dist

    group = getattr(module, "process_group", None)
    if type(module).__name__ == "DistributedDataParallel" and group is not None:
        return int(group.size())
    is_alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    return 1 if is_alone else None
