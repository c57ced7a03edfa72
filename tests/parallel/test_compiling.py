"""Compiled training against one process: the same losses under every parallelism, what breaks is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.bed.heavy_imports import INDUCTOR
from tests.bed.world import World
from tests.parallel.golden import FEW_STEPS, STEPS, golden
from tests.parallel.sharded.test_module import Curve, train_all
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.parallel.compiling import Compiled, compile_model, uncompiled
from torsh_distributed.plan import CompileConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # inductor's own imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]
COMPILE = {"compile": {"enabled": True}}
ONE = {"mesh": {"dp": 1}}
Case = tuple[str, dict[str, Any]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


class Breaking(Layer):
    @override
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # as where torch cannot trace an operation
        return super().forward(x)


def stack(kind: type[Layer]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(3)))


@contextmanager
def eager_backend() -> Iterator[None]:
    """Graphs are traced but not turned into code, which takes most of the time."""
    compile_ = torch.compile
    torch.compile = lambda function, **options: compile_(  # type: ignore[assignment]
        function, backend="aot_eager", fullgraph=options["fullgraph"]
    )
    try:
        yield
    finally:
        torch.compile = compile_


def with_eager_backend(config: CompileConfig, model: nn.Module) -> None:
    with eager_backend():
        compile_model(model, config)


def compiled_by_inductor() -> bool:
    """Whether generated code computes what the layers do."""
    model, plain = stack(Layer), stack(Layer)
    compile_model(model, CompileConfig(enabled=True))
    x = torch.randn(2, 4)
    with torch.no_grad():
        return torch.allclose(model(x), plain(x), atol=1e-6)


def first_calls(kind: type[Layer]) -> tuple[list[events.CompileEvent], bool, list[str]]:
    """The events of two calls, whether the results are those of the plain model, and the warnings."""
    model, plain = stack(kind), stack(kind)
    seen: list[events.CompileEvent] = []
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torsh_distributed")
    logger.addHandler(handler)
    stop = events.subscribe(seen.append, events.CompileEvent)  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    with_eager_backend(CompileConfig(enabled=True), model)
    assert [name for name, _ in model.named_parameters()] == names
    x = torch.randn(2, 4)
    is_equal = all(torch.allclose(model(x), plain(x)) for _ in range(2))
    stop()
    logger.removeHandler(handler)
    return seen, is_equal, warned


def refused() -> str:
    torch._dynamo.reset()  # graphs of the same code would be taken
    model = stack(Breaking)
    with_eager_backend(CompileConfig(enabled=True, graph_breaks="refuse"), model)
    with pytest.raises(ConfigurationError) as caught:
        model(torch.randn(2, 4))
    assert 'compile.graph_breaks = "warn"' in str(caught.value.hint)
    return str(caught.value)


def all_first_calls() -> tuple[Any, Any, str]:
    return first_calls(Layer), first_calls(Breaking), refused()


@pytest.mark.matrix
@pytest.mark.needs_command("g++")
@pytest.mark.skipif(" " in torch.__path__[0], reason="torch's compiler does not link where torch's path has a space")
def test_generated_code_computes_what_layers_do(world: World) -> None:
    assert world.run(compiled_by_inductor, num_ranks=1, imports=INDUCTOR, timeout_s=110) == [True]


def test_layers_say_that_they_are_compiled_and_where_they_break(world: World) -> None:
    plain, breaking, message = world.run(all_first_calls, num_ranks=1)[0]
    seen, is_equal, warned = plain
    assert is_equal
    assert not warned
    assert [(event.function, event.progress, event.graph_breaks) for event in seen] == [
        (f"{index} (Layer)", f"{index + 1} of 3", ()) for index in range(3)
    ]
    seen, is_equal, warned = breaking
    assert is_equal
    assert "graph_break()" in seen[0].graph_breaks[0]
    assert "0 (Breaking) is compiled in parts" in warned[0]
    assert "0 (Breaking) cannot be compiled as one graph" in message


@pytest.mark.slow
def test_the_reason_of_a_failure_names_a_path_with_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise torch._dynamo.exc.BackendCompilerFailed(fail, RuntimeError("g++ failed"), None)

    compiled = Compiled(lambda x: x, CompileConfig(enabled=True), label="f")
    monkeypatch.setattr(compiled, "_function", fail)
    with pytest.raises(FeatureNotAvailable, match=r"f could not be compiled") as plain:
        compiled(torch.ones(1))
    monkeypatch.setattr(torch, "__path__", ["/home/a b/torch"])
    with pytest.raises(FeatureNotAvailable) as spaced:
        compiled(torch.ones(1))
    assert "without a space: /home/a b/torch" in str(spaced.value)
    assert "/home/a b" not in str(plain.value)


def test_a_model_is_compiled_whole_where_asked_or_where_nothing_repeats() -> None:
    assert list(compile_model(stack(Layer), CompileConfig(enabled=True))) == ["0", "1", "2"]
    assert list(compile_model(stack(Layer), CompileConfig(enabled=True, scope="model"))) == [""]
    assert list(compile_model(Layer(), CompileConfig(enabled=True))) == [""]
    assert compile_model(Layer(), CompileConfig()) == {}


def test_uncompiled_functions_run_as_written() -> None:
    calls: list[bool] = []
    compiled = Compiled(lambda: calls.append(torch.compiler.is_compiling()), CompileConfig(enabled=True), label="f")
    with uncompiled():
        compiled()
    assert calls == [False]


SHORT: list[Case] = [("gpt", {**COMPILE, "mesh": {"dp": 1, "shard": 2}, "activation": {"strategy": "selective"}})]
LONG: list[tuple[int, list[Case]]] = [
    (1, [("gpt", {**ONE, **COMPILE}), ("gpt", {**ONE, "compile": {"enabled": True, "scope": "model"}})]),
    (
        2,
        [
            ("gpt", {**COMPILE, "activation": {"strategy": "uniform", "every_n_layers": 1}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 1, "shard": 2}, "activation": {"strategy": "selective"}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 2}}),
            ("gpt", {"mesh": {"dp": 2}, "compile": {"enabled": True, "scope": "model", "dynamic": "never"}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 1, "shard": 2}, "activation": {"strategy": "by_size"}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 1, "shard": 2}, "training": {"gradient_accumulation": 2}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 1, "tp": 2}}),
            ("gpt", {**COMPILE, "mesh": {"dp": 1, "pp": 2}, "pipeline": {"num_microbatches": 2}}),
            ("moe", {**COMPILE, "mesh": {"dp": 1, "ep": 2}}),
        ],
    ),
    (4, [("gpt", {**COMPILE, "mesh": {"dp": 1, "shard": 2, "tp": 2}})]),
]


def train_traced(cases: list[Case]) -> list[Curve]:
    with eager_backend():
        return train_all(cases, FEW_STEPS)


def assert_golden(
    world: World,
    num_ranks: int,
    cases: list[Case],
    function: Callable[[list[Case]], list[Curve]] = train_all,
    timeout_s: float = 110,
) -> None:
    options = {"num_ranks": num_ranks, "backend": "torsh", "timeout_s": timeout_s, "imports": INDUCTOR}
    for curves in world.run(function, cases, **options):
        for (name, sections), curve in zip(cases, curves, strict=True):
            assert len(curve) in (FEW_STEPS, STEPS)
            for mine, expected in zip(curve, golden(name)[: len(curve)], strict=True):
                assert mine == pytest.approx(expected, rel=2e-4), sections


def test_compiled_layers_train_as_one_process_does_in_shards(world: World) -> None:
    assert_golden(world, 2, SHORT, train_traced)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("num_ranks", "case"), [(num_ranks, case) for num_ranks, cases in LONG for case in cases], ids=str
)
def test_compiled_training_is_that_of_one_process_on_every_axis(world: World, num_ranks: int, case: Case) -> None:
    """Code that inductor generates, which takes minutes on a busy machine."""
    assert_golden(world, num_ranks, [case], timeout_s=400)
