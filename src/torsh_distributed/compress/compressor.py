"""GradientCompressor: one codec, its error feedback and its rules, for use by hand or under data parallelism."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.compress.averaging.named_buffers import Layout, Piece
from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.auto import CANDIDATES, NEARLY_EXACT, AutoCodec
from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.sparse.bernoulli import ScaledBernoulliCodec
from torsh_distributed.compress.codecs.sparse.randomk import ScaledRandomKCodec
from torsh_distributed.compress.compression_stats import CompressionStats
from torsh_distributed.compress.feedback import DifferenceFeedback, Feedback, make_feedback
from torsh_distributed.compress.messages.compressed_gradient import (
    DENSE,
    CompressedGradient,
    check_dense,
    is_finite,
    norm,
    num_bytes,
)
from torsh_distributed.compress.messages.sparse import dense
from torsh_distributed.compress.policy import is_dense_step, stream_of, travels_dense
from torsh_distributed.errors import CompressionError, ConfigurationError, InvalidArgument
from torsh_distributed.plan import CompressConfig


class GradientCompressor:
    """Compresses gradients by name, and remembers for each what compression left out.

    A method alone, such as "topk:0.01", stands for `CompressConfig(method=…)`. By hand: `compress` and `decompress`
    for each tensor. Over a group: `all_reduce_mean`, on every rank. Either way `step()` after each step of training.
    With `group` the ranks compare their settings at construction, else at the first average.

    What is remembered is each rank's own. When the group changes (`use_group`), those who stay keep theirs, a newcomer
    starts at zero, and what a rank that left had not sent yet is lost; the codec's state starts anew on all ranks.
    """

    def __init__(
        self,
        config: CompressConfig | str,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        codec: Codec | None = None,
    ) -> None:
        self._config = config if isinstance(config, CompressConfig) else CompressConfig(method=config)
        self._seed = seed
        self._codec = codec or _codec_for(self._config)
        self._has_own_codec = codec is not None
        self._feedback = make_feedback(self._config)
        # What the senders of differences told so far, for `decompress`.
        self._told = DifferenceFeedback()
        self._shapes: dict[int, Sequence[Sequence[int]]] = {}
        self._group: dist.ProcessGroup | None = None
        self._home: tuple[int, int] | None = None
        self._has_foreign_state = False
        self.num_steps = 0
        """Steps counted so far."""
        self.stats = CompressionStats()
        """Totals since construction."""
        if group is not None:
            self.use_group(group)

    @property
    def config(self) -> CompressConfig:
        """The settings in force."""
        return self._config

    @property
    def codec(self) -> Codec:
        """What encodes and decodes."""
        return self._codec

    @property
    def feedback(self) -> Feedback:
        """What remembers the parts left out."""
        return self._feedback

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that average together; None until that is known."""
        return self._group

    @property
    def has_foreign_state(self) -> bool:
        """Whether what is remembered may not fit the other ranks': the next average is then dense, and mends that."""
        return self._has_foreign_state

    @property
    def is_dense_step(self) -> bool:
        """Whether everything travels uncompressed at the present step."""
        return is_dense_step(self._config, self.num_steps)

    def travels_dense(self, name: str, numel: int) -> bool:
        """Whether this tensor is never compressed."""
        return travels_dense(self._config, name, numel)

    def key(self, names: Sequence[str]) -> Key:
        """Where the codec's randomness comes from at the present step, for tensors that travel as one."""
        rank = 0 if self._group is None else self._group.rank()
        return Key(seed=self._seed, step=self.num_steps, stream=stream_of(names), rank=rank)

    def tell_shapes(self, stream: int, shapes: Sequence[Sequence[int]]) -> None:
        """Tell the codec, once, which tensors lie behind the flat ones of a stream."""
        if self._shapes.get(stream) != shapes:
            self._codec.set_shapes(stream, shapes)
            self._shapes[stream] = shapes

    # --- by hand ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def compress(self, name: str, tensor: Tensor) -> CompressedGradient:
        """The message for one gradient; what it leaves out is remembered under `name`.

        Small or named tensors, and all of them at dense steps, go whole, with what was carried over for them. NaN and
        infinity go whole as well, as they would without compression, and change nothing that is remembered.
        """
        check_dense(name, tensor)
        started = time.perf_counter()
        layout: Layout = (Piece(name, tensor.numel()),)
        if self.is_dense_step or self.travels_dense(name, tensor.numel()):
            message = self._compress_dense(layout, tensor)
        elif not is_finite(tensor):
            self.stats.num_nonfinite += 1
            message = self._whole(name, tensor, tensor.detach().flatten())
        else:
            message = self._compress(layout, tensor)
        self.stats.bytes_before += num_bytes(tensor)
        self.stats.bytes_on_wire += message.num_bytes
        self.stats.encode_s += time.perf_counter() - started
        return message

    def _compress(self, layout: Layout, tensor: Tensor) -> CompressedGradient:
        name, key = layout[0].name, self.key([layout[0].name])
        x = self._feedback.prepare(layout, [tensor])
        self.tell_shapes(key.stream, [tuple(tensor.shape)])
        payload = self._codec.encode(x, key)
        sent = self._codec.decode(payload, x.numel(), key)
        stats = self.stats
        stats.num_tensors += 1
        stats.error_norm, stats.original_norm = norm(x - sent), norm(x)
        self._feedback.accept(layout, x, sent, sent)
        return CompressedGradient(
            method=self._config.method,
            data=payload,
            original_shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            metadata={
                "name": name,
                "key": tuple(key),
                "is_difference": self._feedback.is_shared,
                "ratio": num_bytes(payload) / num_bytes(tensor) if tensor.numel() else 1.0,
                "error_norm": stats.error_norm,
                "original_norm": stats.original_norm,
            },
        )

    def _compress_dense(self, layout: Layout, tensor: Tensor) -> CompressedGradient:
        values = tensor.detach().flatten()
        carried = self._feedback.carried(layout, tensor.device)
        whole = values if carried is None else values + carried.to(values.dtype)
        is_kept = carried is not None or (self._feedback.is_shared and not self.travels_dense(*layout[0]))
        if is_kept and is_finite(whole):
            self._feedback.accept_dense(layout, values, values)
        return self._whole(layout[0].name, tensor, whole)

    def _whole(self, name: str, tensor: Tensor, values: Tensor) -> CompressedGradient:
        self.stats.num_dense += 1
        return CompressedGradient(
            method=DENSE,
            data=values.clone(),
            original_shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            metadata={"name": name, "key": tuple(self.key([name])), "ratio": 1.0, "error_norm": 0.0},
        )

    @torch.no_grad()
    def decompress(self, message: CompressedGradient) -> Tensor:
        """The tensor a message stands for, in its shape and dtype.

        Under ef21 the messages of a sender build on each other: give all of them, in order, to one compressor.
        """
        started = time.perf_counter()
        name, key = message.metadata["name"], Key(*message.metadata["key"])
        numel = torch.Size(message.original_shape).numel()
        told: Layout = (Piece(f"{name} of rank {key.rank}", numel),)
        if message.method == DENSE:
            flat = message.data
            if self._feedback.is_shared and not self.travels_dense(name, numel) and is_finite(flat):
                self._told.accept_dense(told, flat, flat)
        elif message.method != self._config.method:
            raise CompressionError(
                f"a message of method {message.method!r} came to a compressor of {self._config.method!r}",
                hint="both sides need the same compression config",
                name=name,
            )
        else:
            self.tell_shapes(key.stream, [message.original_shape])
            flat = self._codec.decode(message.data, numel, key)
            if message.metadata["is_difference"]:
                flat = dense(self._told.accept(told, flat, flat, flat))
        self.stats.decode_s += time.perf_counter() - started
        return flat.to(message.dtype, copy=True).view(message.original_shape)

    def step(self) -> None:
        """Count a step of training: warm-up, period and the codec's randomness go by it."""
        self.num_steps += 1
        self._has_foreign_state = False

    # --- over a group -----------------------------------------------------------------------------------------

    def all_reduce_mean(self, named: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        """Replace each tensor by its mean over the ranks, in place; every rank gives the same names in the same order.

        `group` stands for the world where none was given at construction. If any rank's tensors hold NaN or infinity,
        the compressed ones become NaN on every rank, and nothing is remembered.
        """
        if self._group is None or group is not None:
            chosen = resolve_group(group)
            if chosen is not self._group:
                self.use_group(chosen)
        assert self._group is not None
        average_named(self, list(named), list(named.values()), self._group)

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Average over this group from now on; every rank of it calls this.

        Raises ConfigurationError on every rank, naming both sides, where settings differ. The ranks go on from the
        furthest step that any of them has seen. If one of them comes from another group, the codec's state starts anew,
        and the next average is dense.
        """
        mine = {
            "config": self._config.model_dump(mode="json"),
            "codec": self._codec.name,
            "seed": self._seed,
            "num_steps": self.num_steps,
            "is_new": self._group is None,
        }
        said = require_same(mine, group=group, except_for=("num_steps", "is_new"))
        self.num_steps = max(one["num_steps"] for one in said)
        if not all(one["is_new"] for one in said):
            self.reset_codec()
            self._has_foreign_state = True
        self._group = group
        if self._home is not None:
            self._check_home(self._home)

    def _check_home(self, home: tuple[int, int]) -> None:
        """State that was loaded before the group was known: is it of this rank, in a group of this size?"""
        assert self._group is not None
        if home != (self._group.rank(), self._group.size()):
            self._feedback.load_state_dict(self._feedback.state_dict(), is_own=False)
            self._has_foreign_state = True
        self._home = None

    # --- settings and state -----------------------------------------------------------------------------------

    def update_config(self, config: CompressConfig | str) -> None:
        """Go on with other settings; over a group every rank calls this, and differences are refused on all of them.

        What was left out so far stays remembered, unless the kind of error feedback changes.
        """
        new = config if isinstance(config, CompressConfig) else self._config.replace(method=config)
        if self._group is not None:
            require_same({"config": new.model_dump(mode="json")}, group=self._group)
        if self._has_own_codec and new.method != self._config.method:
            raise InvalidArgument(
                "the method cannot change: this compressor was given a codec",
                hint="make a new GradientCompressor with another codec",
                method=new.method,
            )
        is_same = (new.method, new.error_feedback) == (self._config.method, self._config.error_feedback)
        if not is_same and not self._has_own_codec:
            self._codec = _codec_for(new)
            self._shapes.clear()
        feedback = make_feedback(new)
        if new.error_feedback == self._config.error_feedback:
            feedback.load_state_dict(self._feedback.state_dict(), is_own=True)
        self._feedback = feedback
        self._config = new

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on, such as after a change of the loss scale; on every rank.

        What was left out was measured in the old scale, and would count too much or too little in the new one.
        """
        self._feedback.rescale(factor)
        self._told.rescale(factor)
        if isinstance(self._codec, DenseCodec):
            self.reset_codec()

    def reset_error_feedback(self, names: Iterable[str] | None = None) -> None:
        """Forget what was left out, of all tensors or of some; over a group every rank does the same."""
        self._feedback.reset(names)

    def reset_codec(self) -> None:
        """Let the codec start anew; every rank does the same."""
        self._codec.reset()
        self._shapes.clear()

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, by parameter name. It is this rank's own: save it for each rank."""
        here = None if self._group is None else (self._group.rank(), self._group.size())
        return {
            "num_steps": self.num_steps,
            "home": here,
            "error_feedback": self._config.error_feedback,
            "feedback": self._feedback.state_dict(),
            "codec": self._codec.state_dict(),
            "method": self._config.method,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; every rank loads its own, or all of them that of one rank.

        State of another rank, or of a group of another size, does not carry over what was left out: that starts at
        zero, and the next average is dense.
        """
        if state["error_feedback"] != self._config.error_feedback:
            raise ConfigurationError(
                f"the state is of error feedback {state['error_feedback']!r}, this compressor has"
                f" {self._config.error_feedback!r}",
                hint="set compress.error_feedback as it was, or leave the compressor's state out",
            )
        home = None if state["home"] is None else (int(state["home"][0]), int(state["home"][1]))
        here = None if self._group is None else (self._group.rank(), self._group.size())
        is_own = home is None or here is None or home == here
        self.num_steps = int(state["num_steps"])
        self._feedback.load_state_dict(state["feedback"], is_own=is_own)
        self.reset_codec()
        if is_own and state["method"] == self._config.method:
            self._codec.load_state_dict(state["codec"])
        self._has_foreign_state = not is_own
        self._home = home if here is None else None


_UNBIASED: Mapping[str, type[Codec]] = {"randomk": ScaledRandomKCodec, "bernoulli": ScaledBernoulliCodec}
"""Codecs that take the place of others where nothing makes up for what those leave out."""


def _codec_for(config: CompressConfig) -> Codec:
    """The codec of a method, with or without memory as the config says."""
    if config.name == "auto":
        methods = NEARLY_EXACT if config.error_feedback == "none" else CANDIDATES
        return AutoCodec({method: _codec_for(config.replace(method=method)) for method in methods})
    if config.error_feedback == "none" and config.name in _UNBIASED:
        return _UNBIASED[config.name](config.parameter)  # type: ignore[call-arg]  # both take a share
    codec = make_codec(config.method)
    if isinstance(codec, DenseCodec):
        codec.server_feedback = config.error_feedback != "none"
    return codec


def compressed_all_reduce(tensor: Tensor, method: str, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` by its mean over the ranks, in place, sent by `method` ("int8", "topk:0.01"); all ranks call it.

    For a single tensor: nothing is remembered. For training, a `GradientCompressor` compensates what is left out.
    """
    config = CompressConfig(method=method, error_feedback="none", warmup_steps=0, skip_below_numel=0)
    GradientCompressor(config).all_reduce_mean({"tensor": tensor}, group=group)
    return tensor
