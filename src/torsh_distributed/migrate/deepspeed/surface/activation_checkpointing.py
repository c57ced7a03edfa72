"""`deepspeed.checkpointing`: layers that backward recomputes, on torch's own checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torsh_distributed.migrate.deepspeed.config.hjson_format import read_config

_settings: dict[str, Any] = {}
_DEFAULTS = {"cpu_checkpointing": False, "partition_activations": False, "contiguous_memory_optimization": False}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set what `checkpoint` does from now on; only keeping inputs in host memory (`checkpoint_in_cpu`) changes it.

    The others tune DeepSpeed's own storage of inputs, which torch's does without.
    """
    _settings.clear()
    _settings.update(_DEFAULTS)
    if deepspeed_config is not None:
        section = read_config(deepspeed_config)[0].get("activation_checkpointing", {})
        if isinstance(section, Mapping):
            _settings.update(section)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    _settings.update({key: value for key, value in given.items() if value is not None})


def is_configured() -> bool:
    """Whether `configure` was called."""
    return bool(_settings)


def reset() -> None:
    """Nothing is kept between steps, so there is nothing to free."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`, keep its inputs alone, and recompute the rest in backward."""
    with _keeping_inputs():
        return torch_checkpoint(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


@contextmanager
def _keeping_inputs() -> Iterator[None]:
    if not _settings.get("cpu_checkpointing"):
        yield
        return
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        yield


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Inputs are whole on every rank that computes with them."""
    _settings["partition_activations"] = partition_activation


def set_num_layers(nlayers: int) -> None:
    """Torch needs no number of layers."""


class RngStatesTracker:
    """Named random states, for code of Megatron that draws some numbers alike and some apart on ranks."""

    def __init__(self) -> None:
        self._states: dict[str, torch.Tensor] = {}

    def add(self, name: str, seed: int) -> None:
        """A new state that starts from `seed`."""
        if name in self._states:
            raise ValueError(f"cuda rng state {name} already exists")
        before = _rng_state()
        torch.manual_seed(seed)
        self._states[name] = _rng_state()
        _set_rng_state(before)

    def reset(self) -> None:
        """Forget all states."""
        self._states = {}

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take over states."""
        self._states = dict(states)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """In the `with` block numbers come from the state of this name."""
        if name not in self._states:
            raise ValueError(f"cuda rng state {name} is not added")
        before = _rng_state()
        _set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _rng_state()
            _set_rng_state(before)


_tracker = RngStatesTracker()


def get_cuda_rng_tracker() -> RngStatesTracker:
    """The one tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the ranks alike, and the state `model-parallel-rng` apart."""
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def _rng_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_rng_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
