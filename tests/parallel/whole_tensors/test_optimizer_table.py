"""The table of the guide "Optimizers": each one under each axis trains as in one process, or is refused in words."""

from __future__ import annotations

import pytest

from tests.bed.world import World
from tests.parallel.whole_tensors.optimizer_cases import AXES, OPTIMIZERS, train_alone, train_each

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Muon in bf16, on processors without it

SINGLE = ["dp", "shard", "zero1", "tp", "pp", "cp", "ep", "offload"]
SHORT = ["Adafactor", "Adagrad", "LBFGS", "Muon", "Rprop", "SparseAdam", "Lamb by hand", "NormalizedSgd by hand"]
FOR_PAIRS = ["Adafactor", "AdamW", "Muon", "Rprop", "Lamb by hand", "SignSgd by hand"]


def refusal(axis: str, name: str) -> str | None:
    """What the message says where an optimizer is refused."""
    if axis == "offload" and name not in ("Adam", "AdamW"):
        return "offload supports Adam and AdamW"
    if name == "LBFGS":
        return "needs a closure"
    if name == "SparseAdam":
        return {"shard": "sparse gradients cannot be sharded", "tp": "sparse cannot be split"}.get(axis)
    if name == "NormalizedSgd by hand" and axis in ("tp", "pp", "ep"):
        return "no rank has all of them"
    return None


def check(world: World, axis: str, names: list[str], num_ranks: int = 2) -> None:
    expected = {name: train_alone(axis, name) for name in names if refusal(axis, name) is None}
    for found in world.run(train_each, axis, names, num_ranks=num_ranks, backend="torsh", timeout_s=110):
        for name, losses in found.items():
            message = refusal(axis, name)
            if message is None:
                assert losses == pytest.approx(expected[name], rel=1e-5), (axis, name)
            else:
                assert isinstance(losses, str), (axis, name)
                assert message in losses


def test_of_each_kind_one_is_split_with_its_layers(world: World) -> None:
    check(world, "tp", ["Adafactor", "Muon", "SparseAdam", "NormalizedSgd by hand"])


@pytest.mark.parametrize(
    "axis", [axis if axis == "shard" else pytest.param(axis, marks=pytest.mark.matrix) for axis in SINGLE]
)
def test_the_ones_that_look_at_more_than_elements(world: World, axis: str) -> None:
    check(world, axis, SHORT)


@pytest.mark.matrix
@pytest.mark.parametrize("axis", SINGLE)
def test_all_others(world: World, axis: str) -> None:
    check(world, axis, sorted(OPTIMIZERS.keys() - set(SHORT)))


@pytest.mark.matrix
@pytest.mark.parametrize("axis", sorted(AXES.keys() - set(SINGLE)))
def test_pairs_of_axes(world: World, axis: str) -> None:
    check(world, axis, FOR_PAIRS, num_ranks=4)
