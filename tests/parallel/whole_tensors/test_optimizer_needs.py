"""What an optimizer must see is known, declared, or found by trying it on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tests.parallel.whole_tensors.optimizer_cases import Lamb, Lars, NormalizedSgd, SignSgd, squashed
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.optim import CpuAdam
from torsh_distributed.parallel.whole_tensors.optimizer_needs import (
    keeps_params,
    known_needs,
    refuse_closures,
    tried_needs,
)


def params() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (6,), (4, 6))]


def first_half(tensor: Tensor, dim: int) -> Tensor:
    return tensor.chunk(2, dim=min(dim, tensor.dim() - 1))[0].clone()


HALVES = [partial(first_half, dim=0), partial(first_half, dim=1)]


def tried(optimizer: Optimizer, *, has_all_params: bool = True) -> str | None:
    return tried_needs(optimizer, 0, HALVES, has_all_params=has_all_params)


class Wrapped(Optimizer):
    """Another optimizer's steps, as Lookahead does."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        self.inner.step()


class Remembering(Optimizer):
    """Updates parameters that it has in a list of its own."""

    def __init__(self, params: Iterable[Tensor], *, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.all = [[param] for param in self.param_groups[0]["params"]]
        self.rule = rule

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        for (param,) in self.all:
            param.sub_(self.rule(param.grad))


class Cautious(torch.optim.AdamW):
    """A class of torch with another step."""

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(param.grad.norm())
        return super().step(closure)


class Renamed(torch.optim.AdamW):
    """A class of torch with other defaults."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


@pytest.mark.parametrize("name", sorted(set(torch.optim.__all__) - {"LBFGS", "Optimizer", "Rprop", "SparseAdam"}))
def test_optimizers_of_torch_are_known(name: str) -> None:
    kind = getattr(torch.optim, name)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return
    held = [param for param in params() if param.dim() == 2]
    assert known_needs(kind(held)) == ("tensors" if name in ("Adafactor", "Muon") else "elements")
    if name != "Muon":  # its products in bf16 are very slow on some processors
        assert tried(kind(held)) == known_needs(kind(held))


def test_a_trial_tells_elements_from_tensors_and_from_the_model() -> None:
    assert tried(torch.optim.Rprop(params())) == "elements"
    assert tried(SignSgd(params(), squashed)) == "elements"
    assert tried(Lars(params())) == "tensors"
    assert tried(Lamb(params())) == "tensors"
    assert tried(Cautious(params())) == "tensors"
    assert tried(NormalizedSgd(params())) == "model"


def test_a_trial_of_the_second_group_uses_its_settings() -> None:
    groups = [{"params": params()[:1], "trust": 0.0}, {"params": params()[1:]}]
    assert tried_needs(Lars(groups), 1, HALVES, has_all_params=True) == "tensors"


def test_a_rate_of_zero_hides_nothing() -> None:
    assert tried(Lamb(params(), lr=0.0)) == "tensors"
    assert tried(torch.optim.Rprop(params(), lr=0.0)) == "elements"


def test_a_trial_leaves_parameters_state_and_random_numbers_alone() -> None:
    held = params()
    before = [param.detach().clone() for param in held]
    optimizer = SignSgd(held, squashed)
    numbers = torch.get_rng_state()
    tried(optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), numbers)
    for param, value in zip(held, before, strict=True):
        assert torch.equal(param, value)
        assert param.grad is None


def test_an_optimizer_with_parameters_of_its_own_is_not_tried_on_them() -> None:
    held = params()
    optimizer = Remembering(held, rule=squashed)
    assert keeps_params(optimizer)
    before = held[0].detach().clone()
    assert tried(optimizer) is None
    assert torch.equal(held[0], before)
    assert not keeps_params(SignSgd(held, squashed))


def test_an_optimizer_says_itself_what_it_needs() -> None:
    optimizer: Any = Lars(params())
    assert known_needs(optimizer) is None
    optimizer.torsh_needs = "elements"
    assert known_needs(optimizer) == "elements"
    optimizer.torsh_needs = "rows"
    with pytest.raises(InvalidArgument, match="not one of elements, tensors, model"):
        known_needs(optimizer)


def test_what_wraps_an_optimizer_needs_what_that_one_needs() -> None:
    assert known_needs(Wrapped(torch.optim.Adam(params()))) == "elements"
    assert known_needs(Wrapped(torch.optim.Adafactor(params()))) == "tensors"
    assert tried(Wrapped(Lamb(params()))) == "tensors"


def test_a_subclass_is_known_if_its_step_is() -> None:
    assert known_needs(Renamed(params())) == "elements"
    assert known_needs(Cautious(params())) is None
    assert known_needs(CpuAdam(params())) == "elements"


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="LBFGS needs a closure"):
        refuse_closures(torch.optim.LBFGS(params()))
    refuse_closures(torch.optim.SGD(params()))
