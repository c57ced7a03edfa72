"""The state of training, sent to a worker that joins while the others go on training.

The source, rank 0, copies its state between two steps and sends the copy from a thread. The updates that it does
meanwhile it logs: averaged gradients and the optimizer's settings. The joiner loads the copy and does the same updates,
which give the same bits. Every element changes in every step, so the difference to an older state is as large as the
state; a gradient is a third of that, and an update takes less time than a step, so the joiner catches up. When little
is left the source lets the world change, and the others wait for the last update alone.
"""

from __future__ import annotations

import logging
import queue
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from torsh_distributed import events, known_variables
from torsh_distributed.comm.backends.base import TorshProcessGroup
from torsh_distributed.comm.backends.hierarchical.group import create_torsh_group
from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.comm.store.store import Store
from torsh_distributed.elastic.epoch_world import open_jobs_store
from torsh_distributed.elastic.state_transfer import filled, outline_of
from torsh_distributed.errors import TorshError

if TYPE_CHECKING:
    from torsh_distributed.train.engine import Engine

_log = logging.getLogger(__name__)

_WORTH_STREAMING_BYTES = 2**20
"""Of parameters. A smaller state is sent within milliseconds while all wait."""
_MAX_LOGGED_BYTES = 2**30
_STATE, _UPDATE, _END, _GIVEN_UP = "state", "update", "end", "given_up"
_CHANGED = "the world changes"
_NEARLY = 1
"""Updates that may be left when the world changes."""


def is_streamed(engine: Engine) -> bool:
    """Whether a joiner's state is sent while the others train; known from plan and model, equal on all ranks."""
    num_bytes = sum(param.nbytes for param in engine.unwrapped.parameters())
    return num_bytes >= _WORTH_STREAMING_BYTES and engine.precision.loss_scale is None


class StreamChannel:
    """Messages from a source to one joiner, over a group of the two: memory on one node, else the network."""

    def __init__(self, *, epoch: int, member: int, is_source: bool, timeout_s: float) -> None:
        """Both ends meet in the job's store, under names of the epoch and of the joiner, once they `connect`."""
        self._is_aborted = False
        self._group: TorshProcessGroup | None = None
        self._store = open_jobs_store(timeout_s)
        attempt = known_variables.text("TORCHELASTIC_RESTART_COUNT")
        name = f"torsh/{attempt}/stream/{epoch}/{member}"
        self._options = SimpleNamespace(
            store=dist.PrefixStore(name, self._store),
            group_rank=0 if is_source else 1,
            group_size=2,
            timeout=timedelta(seconds=timeout_s),
            global_ranks_in_group=[0, 1],
            group_id=name,
        )

    def connect(self) -> None:
        """Wait for the other end."""
        group = self._group = create_torsh_group(self._options, None)
        if self._is_aborted:
            group.abort(_CHANGED)

    def send(self, what: str, tensors: list[Tensor], **facts: Any) -> None:
        """Send tensors in host memory, and plain values with them."""
        shapes = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors]
        data = serialize({"what": what, "shapes": shapes, **facts})
        self._move(torch.tensor([len(data)]))
        self._move(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for tensor in tensors:
            if tensor.numel():
                self._move(tensor)

    def receive(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The next message."""
        size = self._move(torch.zeros(1, dtype=torch.int64))
        data = self._move(torch.zeros(int(size), dtype=torch.uint8))
        told: dict[str, Any] = deserialize(data.numpy().tobytes())
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in told["shapes"]]
        for tensor in tensors:
            if tensor.numel():
                self._move(tensor)
        return told, tensors

    def _move(self, tensor: Tensor) -> Tensor:
        assert self._group is not None, "connected before"
        self._group.broadcast([tensor], root=0).wait()
        return tensor

    def abort(self) -> None:
        """From any thread: release whoever waits, at both ends."""
        self._is_aborted = True
        if isinstance(self._store, Store):
            self._store.cut()
        group = self._group
        if group is not None:
            group.abort(_CHANGED)

    def close(self) -> None:
        """Leave the group and the store."""
        if self._group is not None:
            self._group.shutdown()
        if isinstance(self._store, Store):
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StateSender:
    """The source's end, made between two steps: sends the state as it is now, then every update."""

    def __init__(self, engine: Engine, *, epoch: int, member: int, timeout_s: float) -> None:
        self._epoch = epoch
        self._member = member
        self._timeout_s = timeout_s
        tensors: list[Tensor] = []
        self._outline = outline_of(engine.strategy.whole_state(engine.optimizer), tensors)
        self._copies = [_copied(tensor) for tensor in tensors]
        self._num_steps, self._num_skipped = engine.num_steps, engine.num_skipped
        self._log: queue.SimpleQueue[tuple[list[Tensor], dict[str, Any]] | None] = queue.SimpleQueue()
        self._is_sent = False
        self._has_failed = False
        self._channel: StreamChannel | None = None
        self._hook = engine.optimizer.register_step_pre_hook(self._note_update)
        self._thread = threading.Thread(target=self._run, name="torsh-state-stream", daemon=True)
        self._thread.start()

    @property
    def is_nearly_done(self) -> bool:
        """Whether the joiner is nearly as far as the others; also if it gets the state another way after all."""
        return self._has_failed or (self._is_sent and self._log.qsize() <= _NEARLY)

    def _note_update(self, optimizer: Optimizer, *_: object) -> None:
        """Before an update of the source: what it is done with."""
        if self._has_failed:
            return
        held = [param.grad for group in optimizer.param_groups for param in group["params"]]
        grads = [_copied(grad) for grad in held if grad is not None]
        settings = [_settings(group) for group in optimizer.param_groups]
        has_grad = [grad is not None for grad in held]
        self._log.put((grads, {"settings": settings, "has_grad": has_grad}))

    def _run(self) -> None:
        try:
            with StreamChannel(
                epoch=self._epoch, member=self._member, is_source=True, timeout_s=self._timeout_s
            ) as channel:
                self._channel = channel
                channel.connect()
                numbers = {"num_steps": self._num_steps, "num_skipped": self._num_skipped}
                channel.send(_STATE, self._copies, outline=self._outline, **numbers)
                self._copies = []
                self._is_sent = True
                while (update := self._log.get()) is not None:
                    grads, facts = update
                    if self._log.qsize() * sum(grad.nbytes for grad in grads) > _MAX_LOGGED_BYTES:
                        channel.send(_GIVEN_UP, [])
                        raise TorshError("it does not catch up: updates are done faster than they are sent")
                    channel.send(_UPDATE, grads, **facts)
                channel.send(_END, [])
        except (TorshError, RuntimeError) as error:
            _log.warning("worker %d gets its state when it enters: %s", self._member, error)
        finally:
            self._channel = None
            self._has_failed = True

    def finish(self) -> None:
        """Between two steps: send what is left, and the end."""
        self._hook.remove()
        self._log.put(None)
        self._thread.join(self._timeout_s)

    def abort(self) -> None:
        """The world changes another way."""
        self._hook.remove()
        channel = self._channel
        if channel is not None:
            channel.abort()
        self._log.put(None)


def receive_state(engine: Engine, channel: StreamChannel) -> bool:
    """In the joiner: take the state, and do the updates that follow, until the world changes; whether it has all."""
    told, tensors = channel.receive()
    device = next(engine.unwrapped.parameters()).device
    engine.strategy.load_whole_state(engine.optimizer, filled(told["outline"], [one.to(device) for one in tensors]))
    engine.num_steps, engine.num_skipped = told["num_steps"], told["num_skipped"]
    events.reached("stream")
    while True:
        told, tensors = channel.receive()
        if told["what"] != _UPDATE:
            return bool(told["what"] == _END)
        _repeat_update(engine.optimizer, told, [one.to(device) for one in tensors])
        engine.num_steps += 1


def _repeat_update(optimizer: Optimizer, told: dict[str, Any], grads: list[Tensor]) -> None:
    waiting = iter(grads)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, has_grad in zip(params, told["has_grad"], strict=True):
        param.grad = next(waiting) if has_grad else None
    for group, settings in zip(optimizer.param_groups, told["settings"], strict=True):
        group.update({name: _like(group.get(name), value) for name, value in settings.items()})
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group: learning rate and so on."""
    plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in plain.items()
        if name != "params" and isinstance(value, int | float | bool | tuple)
    }


def _like(old: Any, value: Any) -> Any:
    """A setting in the form that the optimizer keeps it in."""
    if isinstance(old, Tensor):
        return torch.full_like(old, value)
    return tuple(value) if isinstance(old, tuple) else value


def _copied(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    copy = tensor.detach().to("cpu")
    return (copy.clone() if copy.data_ptr() == tensor.data_ptr() else copy).contiguous()


def state_sum(engine: Engine) -> list[int]:
    """Numbers that differ, in all likelihood, if any bit of parameters or optimizer state does."""
    tensors: list[Tensor] = []
    outline_of(engine.strategy.whole_state(engine.optimizer)["optimizer"], tensors)
    tensors += [param.detach() for param in engine.unwrapped.parameters()]
    return [_bits(tensor) for tensor in tensors]


def _bits(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    if flat.element_size() == 4:
        return int(flat.view(torch.int32).sum(dtype=torch.int64))
    return int(flat.view(torch.uint8).sum(dtype=torch.int64))
