"""CompressorState: one codec, its error feedback, its rules and its step count, as averages and messages use them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist

from torsh_distributed import events
from torsh_distributed.comm.agreement import require_same
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.auto import CANDIDATES, NEARLY_EXACT, AutoCodec
from torsh_distributed.compress.codecs.base import Codec, Key
from torsh_distributed.compress.codecs.dense.base import DenseCodec
from torsh_distributed.compress.codecs.sparse.random_choice import ScaledBernoulliCodec, ScaledRandomKCodec
from torsh_distributed.compress.feedback import Feedback, make_feedback
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.plan import CompressConfig


@dataclass(kw_only=True, slots=True)
class CompressionStats:
    """Running totals of one compressor on this rank."""

    num_tensors: int = 0
    """Tensors that were compressed."""

    num_dense: int = 0
    """Tensors sent uncompressed: small or named ones, and all of them at dense steps, warm-up included."""

    num_nonfinite: int = 0
    """Buckets not averaged because some rank's gradient held NaN or infinity."""

    bytes_before: int = 0
    """Bytes of all gradients as this rank would have sent them uncompressed: once by hand, and in an average of P ranks
    2 (P - 1) / P times, which is what a ring sends."""

    bytes_on_wire: int = 0
    """Bytes of payload that this rank sent instead, as the codec counts them."""

    error_norm: float | None = None
    """Norm of what the last measured message left out; None until one was measured."""

    original_norm: float | None = None
    """Norm of the tensor that the message was made from."""

    encode_s: float = 0.0
    """Seconds spent in `compress`."""

    decode_s: float = 0.0
    """Seconds spent in `decompress`."""

    exchange_s: float = 0.0
    """Seconds spent in averages over a group: encoding, transfer and decoding together."""

    @property
    def ratio(self) -> float | None:
        """Bytes on the wire over bytes before; None before anything was sent."""
        return self.bytes_on_wire / self.bytes_before if self.bytes_before else None

    @property
    def relative_error(self) -> float | None:
        """Norm of what the last measured message left out, relative to the tensor it was made from."""
        if self.error_norm is None or not self.original_norm:
            return None
        return self.error_norm / self.original_norm

    def to_dict(self) -> dict[str, float | int | None]:
        """All fields and ratios, ready for JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "ratio": self.ratio, "relative_error": self.relative_error}


def is_warm_up(config: CompressConfig, step: int) -> bool:
    """Whether this step is one of the first, which travel uncompressed."""
    return step < config.warmup_steps


def is_dense_step(config: CompressConfig, step: int) -> bool:
    """Whether this step sends everything uncompressed: during warm-up, and between compressed steps."""
    if config.name == "none" or is_warm_up(config, step):
        return True
    return (step - config.warmup_steps) % config.period != 0


def travels_dense(config: CompressConfig, name: str, numel: int) -> bool:
    """Whether this tensor is never compressed: it is small, or a pattern of `skip_names` matches its name."""
    return numel < config.skip_below_numel or any(fnmatchcase(name, pattern) for pattern in config.skip_names)


def stream_of(names: Iterable[str]) -> int:
    """A number for tensors that travel as one, equal on all ranks and in every run (unlike `hash`)."""
    return zlib.crc32("\n".join(names).encode())


class CompressorState:
    """What a compressor is made of and remembers; a restart saves and loads it.

    The residuals of error feedback belong to this rank alone. Codec, settings and step count are the same on all ranks
    of `group`.
    """

    def __init__(self, config: CompressConfig | str, *, seed: int = 0, codec: Codec | None = None) -> None:
        self._config = config if isinstance(config, CompressConfig) else CompressConfig(method=config)
        self._seed = seed
        self._codec = codec or _codec_for(self._config)
        self._has_own_codec = codec is not None
        self._feedback = make_feedback(self._config)
        self._shapes: dict[int, Sequence[Sequence[int]]] = {}
        self._group: dist.ProcessGroup | None = None
        self._saved_by: tuple[int, int] | None = None
        self._has_foreign_state = False
        self._is_announced_warm_up: bool | None = None
        self.num_steps = 0
        """Steps counted so far."""
        self.stats = CompressionStats()
        """Totals since construction."""

    @property
    def config(self) -> CompressConfig:
        """The settings in force."""
        return self._config

    @property
    def codec(self) -> Codec:
        """Encodes and decodes."""
        return self._codec

    @property
    def feedback(self) -> Feedback:
        """Remembers what compression left out."""
        return self._feedback

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that average together; None until that is known."""
        return self._group

    @property
    def has_foreign_state(self) -> bool:
        """Whether this rank's state may not match the others'; the next average is then dense, which resolves it."""
        return self._has_foreign_state

    @property
    def is_dense_step(self) -> bool:
        """Whether the present step sends everything uncompressed."""
        return is_dense_step(self._config, self.num_steps)

    def travels_dense(self, name: str, numel: int) -> bool:
        """Whether this tensor is never compressed."""
        return travels_dense(self._config, name, numel)

    def key(self, names: Sequence[str]) -> Key:
        """The seed of the codec's randomness at the present step, for tensors that travel as one."""
        rank = 0 if self._group is None else self._group.rank()
        return Key(seed=self._seed, step=self.num_steps, stream=stream_of(names), rank=rank)

    def set_shapes(self, stream: int, shapes: Sequence[Sequence[int]]) -> None:
        """Give the codec, once, the shapes of the tensors that were flattened into a stream."""
        if self._shapes.get(stream) != shapes:
            self._codec.set_shapes(stream, shapes)
            self._shapes[stream] = shapes

    def step(self) -> None:
        """Count a training step: warm-up, period and the codec's randomness depend on it."""
        self.num_steps += 1
        self._has_foreign_state = False
        self.announce_warm_up()

    def announce_warm_up(self) -> None:
        """Emit a DecisionEvent when warm-up starts and when compression sets in; nothing without warm-up."""
        config = self._config
        is_now = is_warm_up(config, self.num_steps)
        if is_now is self._is_announced_warm_up or config.name == "none" or not config.warmup_steps:
            return
        self._is_announced_warm_up = is_now
        setting = f"compress.warmup_steps={config.warmup_steps}"
        if is_now:
            choice = f"uncompressed until step {config.warmup_steps}"
            reason = f"{setting}: early gradients change fast; {config.method} afterwards"
        else:
            choice, reason = f"{config.method} from step {self.num_steps} on", f"{setting}: warm-up is over"
        events.emit(events.DecisionEvent(subject="start of compression", choice=choice, reason=reason))

    def update_config(self, config: CompressConfig | str) -> None:
        """Continue with other settings; over a group every rank calls this, and all of them raise if settings differ.

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
        self._continue_with(new)

    def _continue_with(self, new: CompressConfig) -> None:
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
        """Gradients are `factor` times as large from now on, e.g. after a change of the loss scale; on every rank.

        Residuals are in the old scale; unscaled they would count too much or too little.
        """
        self._feedback.rescale(factor)
        if isinstance(self._codec, DenseCodec):
            self.reset_codec()

    def reset_error_feedback(self, names: Iterable[str] | None = None) -> None:
        """Forget what was left out, of all tensors or of some; over a group every rank does the same."""
        self._feedback.reset(names)

    def reset_codec(self) -> None:
        """Reset the codec's state; every rank does the same."""
        self._codec.reset()
        self._shapes.clear()

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, by parameter name. It is this rank's own: save it for each rank."""
        return {
            "num_steps": self.num_steps,
            "home": self._place,
            "error_feedback": self._config.error_feedback,
            "feedback": self._feedback.state_dict(),
            "codec": self._codec.state_dict(),
            "method": self._config.method,
            "period": self._config.period,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; every rank loads its own, or all of them load one rank's.

        From the state of another rank, or of a group of another size, residuals are not taken over: they start at
        zero, and the next average is dense.
        """
        if state["error_feedback"] != self._config.error_feedback:
            raise ConfigurationError(
                f"the state was saved with error feedback {state['error_feedback']!r}, this compressor has"
                f" {self._config.error_feedback!r}",
                hint="set compress.error_feedback as it was, or leave the compressor's state out",
            )
        saved_by = None if state["home"] is None else (int(state["home"][0]), int(state["home"][1]))
        here = self._place
        is_own = saved_by is None or here is None or saved_by == here
        self.num_steps = int(state["num_steps"])
        self._feedback.load_state_dict(state["feedback"], is_own=is_own)
        self.reset_codec()
        if is_own and state["method"] == self._config.method:
            self._codec.load_state_dict(state["codec"])
        self._has_foreign_state = not is_own
        self._saved_by = saved_by if here is None else None

    @property
    def _place(self) -> tuple[int, int] | None:
        """This rank and the size of its group; None without a group."""
        return None if self._group is None else (self._group.rank(), self._group.size())


_UNBIASED: Mapping[str, type[Codec]] = {"randomk": ScaledRandomKCodec, "bernoulli": ScaledBernoulliCodec}
"""Codecs that replace biased ones where no error feedback compensates the bias."""


def _codec_for(config: CompressConfig) -> Codec:
    """The codec of a method, with or without state for error feedback as the config says."""
    if config.name == "auto":
        methods = NEARLY_EXACT if config.error_feedback == "none" else CANDIDATES
        return AutoCodec({method: _codec_for(config.replace(method=method)) for method in methods})
    if config.error_feedback == "none" and config.name in _UNBIASED:
        return _UNBIASED[config.name](config.parameter)  # type: ignore[call-arg]  # both take a share
    codec = make_codec(config.method)
    if isinstance(codec, DenseCodec):
        codec.server_feedback = config.error_feedback != "none"
    return codec
