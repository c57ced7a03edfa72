"""torch.compile as a plan asks for it: each layer that repeats, or the whole model.

Only `forward` is compiled, in place: names of modules and parameters do not change, and hooks of sharding and paging
stay outside the graph. Layers of one class share their graphs, so a deep model compiles about as fast as one layer.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.parallel import torch_internals
from torsh_distributed.parallel.models.wrapping import Named, repeated_layers
from torsh_distributed.plan.sections.training import CompileConfig

_log = logging.getLogger(__name__)

_DYNAMIC = {"auto": None, "never": False, "always": True}
_MODES = {
    (False, False): None,
    (False, True): "reduce-overhead",
    (True, False): "max-autotune-no-cudagraphs",
    (True, True): "max-autotune",
}
"""torch's name for (autotune, cuda_graphs)."""
_SHOWN = 3
_Function = TypeVar("_Function", bound=Callable[..., Any])


def compile_model(model: nn.Module, config: CompileConfig, *, layers: Named | None = None) -> Named:
    """Compile the model in place as the config says; returns the modules that are compiled, by name.

    `layers` are what `scope = "layers"` compiles; by default those that repeat, or the model itself if none do. torch
    compiles at the first call: what it cannot do is reported then, before the first update.
    """
    if not config.enabled:
        return {}
    chosen = {"": model} if config.scope == "model" else (layers or repeated_layers(model) or {"": model})
    raise_recompile_limit(config)
    _keep_outside()
    for number, (name, module) in enumerate(chosen.items(), 1):
        progress = f"{number} of {len(chosen)}"
        label = f"{name or 'the model'} ({type(module).__name__})"
        module.forward = Compiled(module.forward, config, label=label, progress=progress)
    return chosen


def raise_recompile_limit(config: CompileConfig) -> None:
    """Let torch keep enough versions of a function: layers of one class share its code, and all of them count."""
    limits = torch_internals._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, config.recompile_limit)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 8 * config.recompile_limit)


OUTSIDE = "communicates between ranks, which no graph contains"
"""Why torch breaks a graph at our function."""

_outside: list[list[Callable[..., Any]]] = []


def outside_graphs(function: _Function) -> _Function:
    """Let a function that sends, or draws numbers for this rank, run as written where it is called in a compiled layer.

    Torch's own decorator imports its compiler, which takes a second: it is put around the function when a model is
    compiled.
    """
    held: list[Callable[..., Any]] = [function]
    _outside.append(held)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return held[0](*args, **kwargs)

    return cast(_Function, call)


def _keep_outside() -> None:
    for held in _outside:
        if not hasattr(held[0], "_torchdynamo_disable"):
            held[0] = torch.compiler.disable(held[0], reason=OUTSIDE)  # type: ignore[no-untyped-call]  # untyped in torch


class Compiled:
    """A compiled function. Its first call says what is compiled and how long that took, and names graph breaks."""

    def __init__(self, function: Callable[..., Any], config: CompileConfig, *, label: str, progress: str = "") -> None:
        self._label = label
        self._progress = progress
        self._config = config
        self._is_warm = False
        self._plain = function
        self._function: Callable[..., Any] = torch.compile(
            function,
            dynamic=_DYNAMIC[config.dynamic],
            mode=_MODES[config.autotune, config.cuda_graphs],
            fullgraph=config.graph_breaks == "refuse",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function."""
        if _num_uncompiled:
            return self._plain(*args, **kwargs)
        return self._function(*args, **kwargs) if self._is_warm else self._first_call(*args, **kwargs)

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        _log.info("compiling %s, %s", self._label, self._progress or "the first call")
        breaks = torch_internals._dynamo.utils.counters["graph_break"]
        before, started = dict(breaks), time.monotonic()
        try:
            result = self._function(*args, **kwargs)
        except (torch_internals._dynamo.exc.Unsupported, torch_internals._dynamo.exc.UserError) as error:
            raise ConfigurationError(
                f"{self._label} cannot be compiled as one graph: {_first_line(error)}",
                hint='change the layer, set compile.graph_breaks = "warn" to run such parts as they are, or leave'
                " compile out",
                key="compile.graph_breaks",
            ) from error
        except torch_internals._dynamo.exc.BackendCompilerFailed as error:
            raise FeatureNotAvailable(
                f"{self._label} could not be compiled: {_first_line(error)}",
                hint=_needs_of_compiler() + "; set compile.enabled = false to run without",
                feature="torch.compile",
            ) from error
        self._is_warm = True
        reasons = [reason for reason, count in breaks.items() if count > before.get(reason, 0)]
        unexpected = [reason for reason in reasons if OUTSIDE not in reason]
        if unexpected:
            shown = "; ".join(_first_line(reason) for reason in unexpected[:_SHOWN])
            _log.warning(
                "%s is compiled in parts, which may be slower than not at all: %s"
                ' (compile.graph_breaks = "refuse" shows where)',
                self._label,
                shown,
            )
        events.emit(
            events.CompileEvent(
                function=self._label,
                progress=self._progress,
                duration_s=time.monotonic() - started,
                graph_breaks=tuple(map(_first_line, reasons)),
            )
        )
        return result


_num_uncompiled = 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled functions run as they were written: what counts operations sees them one by one."""
    global _num_uncompiled
    _num_uncompiled += 1
    try:
        yield
    finally:
        _num_uncompiled -= 1


def _needs_of_compiler() -> str:
    needs = "the compiler needs g++ on a CPU and Triton on a GPU"
    # It gives the linker the folder of torch's libraries without quotes.
    return f"{needs}, and a path of torch without a space: {torch.__path__[0]}" if " " in torch.__path__[0] else needs


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "no reason given")
