"""DeepSpeed's flops profiler: operations, multiply-adds, parameters and latency of one forward, by module.

Matrix products, convolutions and attention count, at two operations for each multiply-add.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.observing.deepspeed_timers import wait_for_device
from torsh_distributed.observe.loops.counted_operations import CountedOperations

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""))


def number_to_string(number: float, units: str | None = None, precision: int = 2) -> str:
    """A number with a unit: `1.5 G`."""
    for size, letter in _UNITS:
        if units == letter or (units is None and (number >= size or letter == "")):
            return f"{number / size:.{precision}f} {letter}"
    return f"{number:.{precision}f} "


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """`1.50 GFLOPS`."""
    return number_to_string(flops, _letter(units, "FLOPS"), precision) + "FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """`1.50 GMACs`."""
    return number_to_string(macs, _letter(units, "MACs"), precision) + "MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """`1.50 M`."""
    return number_to_string(params_num, units, precision).rstrip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds as `1.50 ms`."""
    sizes = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
    require(units is None or units in sizes, "durations are told in us, ms or s", units=units)
    unit = units or ("s" if duration >= 1 else "ms" if duration >= 1e-3 else "us")
    return f"{duration / sizes[unit]:.{precision}f} {unit}"


def _letter(units: str | None, word: str) -> str | None:
    """G of GFLOPS."""
    return None if units is None else units.removesuffix(word)


class FlopsProfiler:
    """Counts one forward: `start_profile()`, a forward, `stop_profile()`; then the `get_total_…` and the print."""

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._stack = ExitStack()
        self._counter: CountedOperations | None = None
        self._seconds: dict[str, float] = {}
        self._flops: dict[str, int] = {}
        self._began: dict[str, tuple[float, int]] = {}
        """By module: when its call began, and how many operations there had been."""

    def start_profile(self, ignore_list: Sequence[type] | None = None) -> None:
        """Begin to count; backward and update are not part of it."""
        self._stack = ExitStack()
        self._counter = self._stack.enter_context(CountedOperations())
        for name, module in self.model.named_modules():
            if ignore_list is not None and isinstance(module, tuple(ignore_list)):
                continue
            for handle in (
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)),
                module.register_forward_hook(lambda *_, name=name: self._leave(name)),
            ):
                self._stack.callback(handle.remove)
        self.started = True

    def stop_profile(self) -> None:
        """Stop counting; the numbers stay."""
        self._stack.close()

    def end_profile(self) -> None:
        """Forget the numbers."""
        self.stop_profile()
        self.started, self._counter, self._seconds, self._flops = False, None, {}, {}

    reset_profile = end_profile

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations of the forward."""
        found = 0 if self._counter is None else self._counter.num_forward_flops
        return f"{number_to_string(found)}FLOPs" if as_string else found

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-adds of the forward."""
        found = int(self.get_total_flops()) // 2
        return f"{number_to_string(found)}MACs" if as_string else found

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds of the forward, with the time that counting takes."""
        found = self._seconds.get("", 0.0)
        return f"{found * 1000:.2f} ms" if as_string else found

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters of the model, over all ranks."""
        found = sum(param.numel() for param in self.model.parameters())
        return f"{number_to_string(found)}" if as_string else found

    def profile_text(
        self, *, profile_step: int = 1, module_depth: int = -1, top_modules: int = 1, detailed: bool = True
    ) -> str:
        """The report: a summary; the heaviest classes of modules at `module_depth`, by default the deepest level, and
        above it; a line for each module down to there."""
        total = int(self.get_total_flops())
        seconds = float(self.get_total_duration())
        rows = [
            ("params", self.get_total_params(as_string=True)),
            ("fwd MACs", self.get_total_macs(as_string=True)),
            ("fwd flops", self.get_total_flops(as_string=True)),
            ("fwd flops with recomputation", f"{number_to_string(total * (1 + self.recompute_fwd_factor))}FLOPs"),
            ("fwd latency", self.get_total_duration(as_string=True)),
            ("fwd FLOPS", flops_to_string(total / seconds if seconds else 0.0)),
        ]
        lines = ["-------------------------- DeepSpeed Flops Profiler --------------------------"]
        lines += [f"Profile Summary at step {profile_step}:"]
        lines += [f"{f'{name}:':<40}{value}" for name, value in rows]
        lines += self._heaviest(module_depth, top_modules)
        if detailed:
            lines.append("by module: params, flops, share of the forward, latency")
            for name, flops in self._flops.items():
                depth = _depth(name)
                if module_depth < 0 or depth <= module_depth:
                    took = self._seconds.get(name, 0.0) * 1000
                    share = 100.0 * flops / total if total else 0.0
                    lines.append(
                        f"{'  ' * depth}{name or 'model'}: {params_to_string(self._params_of(name))} params,"
                        f" {number_to_string(flops)}FLOPs, {share:.1f} %, {took:.2f} ms"
                    )
        return "\n".join(lines)

    def _heaviest(self, module_depth: int, top_modules: int) -> list[str]:
        """For each level the classes with most parameters, multiply-adds and time."""
        deepest = max(map(_depth, self._flops), default=0)
        last = deepest if module_depth < 0 else min(module_depth, deepest)
        lines = [f"Top {top_modules} modules in terms of params, MACs or fwd latency at different model depths:"]
        for depth in range(last + 1):
            sums: dict[str, list[float]] = {}
            for name in self._flops:
                if _depth(name) == depth:
                    found = sums.setdefault(type(self.model.get_submodule(name)).__name__, [0.0, 0.0, 0.0])
                    found[0] += self._params_of(name)
                    found[1] += self._flops[name] / 2
                    found[2] += self._seconds.get(name, 0.0)
            lines.append(f"depth {depth}:")
            for place, (title, told) in enumerate(
                (("params", params_to_string), ("MACs", macs_to_string), ("fwd latency", duration_to_string))
            ):
                best = sorted(sums.items(), key=lambda one: -one[1][place])[:top_modules]
                lines.append(f"    {title:<12}- " + ", ".join(f"{kind} {told(found[place])}" for kind, found in best))
        return lines

    def _params_of(self, name: str) -> int:
        return sum(param.numel() for param in self.model.get_submodule(name).parameters())

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules with most parameters, multiply-adds and time."""
        print("\n".join(self._heaviest(module_depth, top_modules)))

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the report, or write it to `output_file`."""
        text = self.profile_text(
            profile_step=profile_step, module_depth=module_depth, top_modules=top_modules, detailed=detailed
        )
        if output_file is None:
            print(text)
            return
        place = Path(output_file)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")

    def _enter(self, name: str) -> None:
        wait_for_device()
        self._flops.setdefault(name, 0)  # in the order of the calls, the model first
        self._began[name] = time.perf_counter(), int(self.get_total_flops())

    def _leave(self, name: str) -> None:
        wait_for_device()
        began_s, num_before = self._began[name]
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began_s
        self._flops[name] += int(self.get_total_flops()) - num_before


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Sequence[type] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Operations, multiply-adds and parameters of one call of `model`; it is in eval mode afterwards."""
    require(isinstance(model, nn.Module), "model must be a PyTorch module")
    require(
        mode in ("forward", "generate"),
        "a profile is of a model's forward or generate",
        hint='write mode="forward" or mode="generate"',
        mode=mode,
    )
    require(
        mode == "forward" or callable(getattr(model, "generate", None)),
        f"{type(model).__name__} has no generate()",
        hint='write mode="forward"',
    )
    given = list(args)
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(()))
        given = [like.new_empty(input_shape, requires_grad=False)]
    require(given or kwargs, "args and/or kwargs must be specified if input_shape is None")
    model.eval()
    call: Any = model.generate if mode == "generate" else model
    with torch.no_grad():
        for _ in range(warm_up):
            call(*given, **(kwargs or {}))
        profiler = FlopsProfiler(model)
        profiler.start_profile(ignore_modules)
        try:
            call(*given, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(1, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
