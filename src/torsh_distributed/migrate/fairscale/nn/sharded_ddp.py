"""FairScale's ShardedDataParallel: backward sends each gradient to the rank whose OSS owns the parameter (ZeRO-2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.reductions import reduce
from torsh_distributed.comm.collectives.work import Work
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.fairscale.optim.oss import OSS
from torsh_distributed.parallel.data.replicated_params import broadcast_from_first
from torsh_distributed.parallel.models.same_model import check_same_model


@dataclass(frozen=True)
class OwnedBucket:
    """Parameters of one owner, dtype and device whose gradients travel in one message."""

    owner: int
    """The rank in the group that gets the mean."""
    params: tuple[nn.Parameter, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each."""
        return [param.numel() for param in self.params]


def plan_owned_buckets(
    params: Sequence[nn.Parameter], owner_of: Callable[[nn.Parameter], int], max_numel: int
) -> list[OwnedBucket]:
    """Buckets of at most `max_numel` elements, in the order in which backward is expected to complete them.

    The order is the same on all ranks, as it follows the parameters' own, backwards. A larger gradient travels alone;
    0 lets every gradient travel alone.
    """
    filling: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    done: list[OwnedBucket] = []
    for param in reversed(params):
        kind = (owner_of(param), param.dtype, param.device)
        inside = filling.setdefault(kind, [])
        if inside and sum(one.numel() for one in inside) + param.numel() > max_numel:
            done.append(OwnedBucket(kind[0], tuple(inside)))
            inside = filling[kind] = []
        inside.append(param)
    done += [OwnedBucket(owner, tuple(inside)) for (owner, _, _), inside in filling.items() if inside]
    return done


_log = logging.getLogger(__name__)


class ShardedDataParallel(nn.Module):
    """A model whose gradients are averaged on the ranks that own their parameters.

    Every rank builds it with the same model and with the OSS (or several) that updates it. Gradients travel while
    backward computes, in buckets of `reduce_buffer_size` elements for each owner; a parameter that got none counts as
    zero. On ranks that do not own a parameter its gradient stays that rank's own part, as in FairScale; with
    `reduce_buffer_size=0` it is None there, which frees the memory. Clip with the OSS, and scale losses with
    ShardedGradScaler: both know who owns what. `reduce_fp16` sends gradients as float16. Backward passes before a step
    add up, in `no_sync()` without being sent.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: OSS | Sequence[OSS],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        given: Any = sharded_optimizer if isinstance(sharded_optimizer, list | tuple) else [sharded_optimizer]
        self._optimizers: list[OSS] = list(given)  # Any: they are checked below
        self._group = resolve_group(process_group)
        self._check_optimizers()
        devices = {param.device for param in module.parameters()}
        self.is_multi_device_module = len(devices) > 1
        self.device_type = next(iter(devices)).type if devices else "cpu"
        check_same_model(module, self._group)
        self._broadcasts_buffers = broadcast_buffers
        self._max_numel = reduce_buffer_size
        self._refreshes = auto_refresh_trainable
        self._wire_dtype = torch.float16 if reduce_fp16 else None
        self._warns = warn_on_trainable_params_changed
        self._is_accumulating = False
        self._all_params: list[nn.Parameter] = [
            param for one in self._optimizers for group in one.param_groups for param in group["params"]
        ]
        self._trained_before: list[bool] = []
        self._hooks: list[RemovableHandle] = []
        self._buckets: list[OwnedBucket] = []
        self._num_steps = 0
        self._backward = _Backward(self._group)
        self._averaged: dict[nn.Parameter, Tensor] = {}
        self._sent_parts: dict[nn.Parameter, Tensor] = {}
        """Gradients that are with their owners now, on a rank that only has its own part of them."""
        self._set_aside: dict[nn.Parameter, Tensor] = {}
        if sync_models_at_startup:
            with torch.no_grad():
                broadcast_from_first(
                    [value for value in module.state_dict().values() if isinstance(value, Tensor)], self._group
                )
        for one in self._optimizers:
            one.register_step_post_hook(lambda *_: self._set_aside.clear())
        self.refresh_trainable()

    def _check_optimizers(self) -> None:
        for one in self._optimizers:
            if not isinstance(one, OSS):
                raise InvalidArgument(
                    f"ShardedDataParallel takes the OSS that updates the model; got {type(one).__name__}",
                    hint="wrap the optimizer class: OSS(model.parameters(), optim=torch.optim.Adam, lr=…)",
                )
            if one.world_size != self._group.size():
                raise InvalidArgument(
                    "ShardedDataParallel and its OSS work on different groups of ranks",
                    hint="give both the same process group",
                    num_ranks=self._group.size(),
                    num_ranks_of_oss=one.world_size,
                )

    # --- the module ---------------------------------------------------------------------------------------------

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._refreshes and [param.requires_grad for param in self._all_params] != self._trained_before:
            if self._warns:
                _log.warning("parameters were frozen or unfrozen: ShardedDataParallel sends other gradients from now")
            self.refresh_trainable()
        self._refuse_graphs_of_gradients()
        if self._broadcasts_buffers and not self._is_accumulating:
            self.sync_buffers()
        return self.module(*inputs, **kwargs)

    def _refuse_graphs_of_gradients(self) -> None:
        for param in self._all_params:
            if param.grad is not None and param.grad.requires_grad:
                raise RuntimeError(
                    "ShardedDataParallel only works with gradients that don't require grad: call backward without "
                    "create_graph, or zero_grad() before the forward"
                )

    @override
    def to(self, *args: Any, **kwargs: Any) -> ShardedDataParallel:
        """Move or cast the model, as `Module.to`."""
        self.module.to(*args, **kwargs)
        self.refresh_trainable()
        return self

    @override
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradients; also those of backward passes that were not sent yet."""
        self._set_aside.clear()
        for param in self._all_params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @override
    def __getattr__(self, name: str) -> Any:
        """Attributes of the model, too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def sync_buffers(self, blocking: bool = True) -> None:
        """Make the buffers, such as running means, those of the first rank; every rank calls this."""
        with torch.no_grad():
            broadcast_from_first(self.module.buffers(), self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of all passes but the last: gradients add up on each rank and are not sent."""
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    # --- gradients ----------------------------------------------------------------------------------------------

    def refresh_trainable(self) -> None:
        """Look up again which parameters are trained; every rank calls this between steps."""
        for hook in self._hooks:
            hook.remove()
        self._trained_before = [param.requires_grad for param in self._all_params]
        trained = [param for param in self._all_params if param.requires_grad]
        owners = {param: one.owner(param) for one in self._optimizers for param in _params(one)}
        self._buckets = plan_owned_buckets(trained, owners.__getitem__, self._max_numel)
        self._backward = self._next_backward()
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._after_gradient)  # type: ignore[no-untyped-call]  # untyped in torch
            for param in trained
        ]
        for param in trained:
            self._hooks.append(param.register_hook(self._before_gradient(param)))  # type: ignore[no-untyped-call]  # untyped in torch

    def _next_backward(self) -> _Backward:
        return _Backward(
            self._group,
            self._buckets,
            self._wire_dtype,
            keeps_parts=self._max_numel > 0,
            already_sent={**self._averaged, **self._sent_parts},
        )

    def reduce(self) -> None:
        """Send the gradients that backward left under `no_sync()`; every rank calls this."""
        sent = {**self._averaged, **self._sent_parts}
        params = [param for bucket in self._buckets for param in bucket.params]
        if all(param.grad is None or param.grad is sent.get(param) for param in params):
            raise InvalidArgument("there are no gradients to reduce", hint="call backward in no_sync() before reduce()")
        self._finish()

    def _before_gradient(self, param: nn.Parameter) -> Any:
        """What has been sent already must not be sent again with what backward is about to add."""

        def set_aside(_: Tensor) -> None:
            if param.grad is not None and param.grad is self._averaged.get(param):
                self._set_aside[param] = param.grad
                param.grad = None
            elif param.grad is not None and param.grad is self._sent_parts.get(param):
                param.grad = None

        return set_aside

    @torch.no_grad()
    def _after_gradient(self, param: Tensor) -> None:
        if self._is_accumulating:
            return
        assert isinstance(param, nn.Parameter), "hooks are on parameters"
        if not self._backward.has_begun:
            self._backward.has_begun = True
            Variable._execution_engine.queue_callback(self._finish)
        self._backward.add(param)

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of backward: all gradients are with their owners."""
        self._averaged = self._backward.finish(self._num_steps)
        self._sent_parts = self._backward.parts
        self._num_steps += 1
        for param, mean in self._averaged.items():
            earlier = self._set_aside.pop(param, self._backward.untouched.get(param))
            if earlier is not None:
                mean.add_(earlier)
            param.grad = mean
        self._backward = self._next_backward()


class _Backward:
    """The gradients of one backward on their way. Buckets leave in their order, which is equal on all ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        buckets: Sequence[OwnedBucket] = (),
        wire_dtype: torch.dtype | None = None,
        *,
        keeps_parts: bool = False,
        already_sent: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.has_begun = False
        self.parts: dict[nn.Parameter, Tensor] = {}
        """This rank's own part of gradients that other ranks own, unless they are freed."""
        self.untouched: dict[nn.Parameter, Tensor] = {}
        """Means of earlier passes that this one adds nothing to."""
        self._keeps_parts = keeps_parts
        self._already_sent = already_sent or {}
        self._group = group
        self._buckets = buckets
        self._wire_dtype = wire_dtype
        self._bucket_of = {param: index for index, bucket in enumerate(buckets) for param in bucket.params}
        self._missing = [set(bucket.params) for bucket in buckets]
        self._sent: list[tuple[Work[Tensor], float]] = []
        """What is on its way, and since when."""

    def add(self, param: nn.Parameter) -> None:
        """A gradient is complete; every bucket that is complete and next leaves."""
        index = self._bucket_of[param]
        if index < len(self._sent):
            raise InvalidArgument(
                "a gradient arrived again after it was sent: backward ran twice over a parameter in one pass",
                hint="use torch.utils.checkpoint with use_reentrant=False, or no_sync() around all passes but the last",
            )
        self._missing[index].discard(param)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def finish(self, step: int) -> dict[nn.Parameter, Tensor]:
        """Send the rest, wait, and return the means of what this rank owns; `step` is for events."""
        while len(self._sent) < len(self._buckets):
            self._send()
        means = {}
        for index, (bucket, (work, started_s)) in enumerate(zip(self._buckets, self._sent, strict=True)):
            flat = work.wait()
            if events.wanted(events.BucketEvent):
                events.emit(
                    events.BucketEvent(
                        step=step,
                        index=index,
                        num_bytes=sum(param.nbytes for param in bucket.params),
                        duration_s=time.monotonic() - started_s,
                        codec=None if self._wire_dtype is None else str(self._wire_dtype),
                        wire_bytes=None if self._wire_dtype is None else flat.nbytes,
                    )
                )
            if bucket.owner == self._group.rank():
                parts = torch.split(flat.to(bucket.params[0].dtype), bucket.sizes)
                means.update({param: part.view_as(param) for param, part in zip(bucket.params, parts, strict=True)})
        return means

    def _gradient(self, param: nn.Parameter) -> Tensor:
        """What this pass, and those in `no_sync()` before it, have added."""
        if param.grad is None or param.grad is self._already_sent.get(param):
            return torch.zeros_like(param)
        return param.grad.detach()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        flat = torch.cat([self._gradient(param).reshape(-1) for param in bucket.params])
        flat.div_(self._group.size())
        is_mine = bucket.owner == self._group.rank()
        for param in bucket.params:
            grad = param.grad
            if grad is not None and is_mine and grad is self._already_sent.get(param):
                self.untouched[param] = grad
            if grad is not None and not is_mine and self._keeps_parts:
                self.parts[param] = grad
            else:
                param.grad = None
        flat = flat if self._wire_dtype is None else flat.to(self._wire_dtype)
        owner = dist.get_global_rank(self._group, bucket.owner)
        self._sent.append((reduce(flat, owner, group=self._group, async_op=True), time.monotonic()))


def _params(optimizer: OSS) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]
