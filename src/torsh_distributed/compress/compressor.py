"""GradientCompressor: compresses gradients by name, for use by hand or under data parallelism."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.compress.adaptive import AdaptiveCompression
from torsh_distributed.compress.averaging.named_mean import average_named
from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.compressor_state import CompressorState
from torsh_distributed.compress.feedback import DifferenceFeedback
from torsh_distributed.compress.messages.compressed_gradient import (
    DENSE,
    CompressedGradient,
    check_dense,
    is_finite,
    norm,
    num_bytes,
)
from torsh_distributed.compress.messages.sparse import dense
from torsh_distributed.compress.named_buffers import FlatEntry, FlatLayout
from torsh_distributed.errors import CompressionError
from torsh_distributed.plan import CompressConfig


class GradientCompressor(CompressorState):
    """Compresses gradients by name, and remembers for each what compression left out.

    A method alone, such as "topk:0.01", stands for `CompressConfig(method=…)`, whose `warmup_steps` is 100: the first
    100 steps travel uncompressed. A DecisionEvent says so when warm-up starts, and again when compression sets in.

    By hand: `compress` and `decompress` each tensor. Over a group: `all_reduce_mean`, on every rank. Either way call
    `step()` after each training step. With `group` the ranks compare their settings at construction, otherwise at the
    first average.

    Residuals are each rank's own. When the group changes (`use_group`), remaining ranks keep theirs, a new rank starts
    at zero, and what a lost rank had not sent yet is lost; the codec's state is reset on all ranks.
    """

    def __init__(
        self,
        config: CompressConfig | str,
        *,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(config, seed=seed, codec=codec)
        # The sum of the differences received so far, by sender, for `decompress`.
        self._received = DifferenceFeedback()
        self._adaptation: AdaptiveCompression | None = None
        self._began_with = f"{self.config.method} {self.config.adapt}"
        if group is not None:
            self.use_group(group)

    def adapt(self, loss: float) -> None:
        """After a training step: change how much is sent, as `compress.adapt` says; every rank calls this."""
        adaptation = self._adaptation_now()
        if adaptation is not None:
            adaptation.step(loss)

    def _adaptation_now(self) -> AdaptiveCompression | None:
        """Of the settings in force: they may change while training."""
        wanted = self.config.adapt
        if wanted == "none":
            self._adaptation = None
        elif self._adaptation is None or self._adaptation.strategy != wanted:
            self._adaptation = AdaptiveCompression(self, wanted)
        return self._adaptation

    @override
    def state_dict(self) -> dict[str, Any]:
        adaptation = self._adaptation_now()
        if adaptation is None:
            return super().state_dict()
        return super().state_dict() | {"adaptation": {**adaptation.state_dict(), "began_with": self._began_with}}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        adaptation, saved = self._adaptation_now(), state.get("adaptation")
        goes_on = adaptation is not None and saved is not None and saved["began_with"] == self._began_with
        if goes_on:  # with the number it had come to; another method or strategy in the plan starts by itself
            self._continue_with(self.config.replace(method=state["method"], period=int(state["period"])))
        super().load_state_dict(state)
        if goes_on and adaptation is not None:
            adaptation.load_state_dict(state["adaptation"])

    # --- by hand ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def compress(self, name: str, tensor: Tensor) -> CompressedGradient:
        """The message for one gradient; what it leaves out is remembered under `name`.

        Small or named tensors, and all of them at dense steps (warm-up included), go whole, with their residuals. NaN
        and infinity go whole as well, as they would without compression, and leave the residuals unchanged.
        """
        check_dense(name, tensor)
        self.announce_warm_up()
        started = time.perf_counter()
        layout: FlatLayout = (FlatEntry(name, tensor.numel()),)
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

    def _compress(self, layout: FlatLayout, tensor: Tensor) -> CompressedGradient:
        name, key = layout[0].name, self.key([layout[0].name])
        x = self._feedback.prepare(layout, [tensor])
        self.set_shapes(key.stream, [tuple(tensor.shape)])
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

    def _compress_dense(self, layout: FlatLayout, tensor: Tensor) -> CompressedGradient:
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
        """The tensor a message encodes, in its shape and dtype.

        Under ef21 the messages of a sender build on each other: pass all of them, in order, to one compressor.
        """
        started = time.perf_counter()
        name, key = message.metadata["name"], Key(*message.metadata["key"])
        numel = torch.Size(message.original_shape).numel()
        layout: FlatLayout = (FlatEntry(f"{name} of rank {key.rank}", numel),)
        if message.method == DENSE:
            flat = message.data
            if self._feedback.is_shared and not self.travels_dense(name, numel) and is_finite(flat):
                self._received.accept_dense(layout, flat, flat)
        elif message.method != self._config.method:
            raise CompressionError(
                f"a message of method {message.method!r} reached a compressor of method {self._config.method!r}",
                hint="both sides need the same compression config",
                name=name,
            )
        else:
            self.set_shapes(key.stream, [message.original_shape])
            flat = self._codec.decode(message.data, numel, key)
            if message.metadata["is_difference"]:
                flat = dense(self._received.accept(layout, flat, flat, flat))
        self.stats.decode_s += time.perf_counter() - started
        return flat.to(message.dtype, copy=True).view(message.original_shape)

    @override
    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        self._received.rescale(factor)

    # --- over a group -----------------------------------------------------------------------------------------

    def all_reduce_mean(self, named: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> None:
        """Replace each tensor by its mean over the ranks, in place; every rank gives the same names in the same order.

        Without `group`, here or at construction, the ranks are the world. If any rank's tensors hold NaN or infinity,
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

        Raises ConfigurationError on every rank, naming both sides, where settings differ. The ranks continue from the
        furthest step that any of them has seen. If one of them comes from another group, the codec's state is reset
        and the next average is dense.
        """
        mine = {
            "config": self._config.model_dump(mode="json"),
            "codec": self._codec.name,
            "seed": self._seed,
            "num_steps": self.num_steps,
            "is_new": self._group is None,
        }
        everyone = require_same(mine, group=group, except_for=("num_steps", "is_new"))
        self.num_steps = max(one["num_steps"] for one in everyone)
        if not all(one["is_new"] for one in everyone):
            self.reset_codec()
            self._has_foreign_state = True
        self._group = group
        # State loaded before the group was known may be another rank's, or of a group of another size.
        if self._saved_by is not None and self._saved_by != self._place:
            self._feedback.load_state_dict(self._feedback.state_dict(), is_own=False)
            self._has_foreign_state = True
        self._saved_by = None


def compressed_all_reduce(tensor: Tensor, method: str, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Replace `tensor` by its mean over the ranks, in place, sent by `method` ("int8", "topk:0.01"); all ranks call it.

    For a single tensor: no warm-up, and nothing is remembered. For training, use a `GradientCompressor`, which
    compensates what is left out.
    """
    config = CompressConfig(method=method, error_feedback="none", warmup_steps=0, skip_below_numel=0)
    GradientCompressor(config).all_reduce_mean({"tensor": tensor}, group=group)
    return tensor
