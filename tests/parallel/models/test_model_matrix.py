"""The models people bring, on every axis: losses of one process, or a refusal that says why."""

from __future__ import annotations

import pytest

from tests.bed.world import World
from tests.parallel.models.model_matrix import AXES, BEGIN, END, GUIDE, cells_of, verdicts
from tests.parallel.models.zoo import SPECIMENS

pytestmark = pytest.mark.needs_library("transformers")

SHORT = ("Llama", "GPT-2", "BERT", "T5", "Qwen3-MoE", "DeepSeek-V3")
REFUSED = {("ResNet-18", "tp"): "refused: mesh.tp 2: found no layer that tensor parallelism can split"}


def test_a_few_models_train_as_one_process_does(world: World) -> None:
    found = verdicts(world, SHORT, ("tp", "ep"), 2)
    assert found == dict.fromkeys(cells_of(SHORT, ("tp", "ep")), "equal")


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_model_of_transformers_trains_as_one_process_does_on_every_axis(world: World, num_ranks: int) -> None:
    names = [name for name, specimen in SPECIMENS.items() if not specimen.is_from_torchvision]
    found = verdicts(world, names, tuple(AXES), num_ranks, timeout_s=800)
    assert found == dict.fromkeys(cells_of(names, tuple(AXES)), "equal")


@pytest.mark.matrix
@pytest.mark.needs_torchvision
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_models_of_torchvision_train_as_one_process_does(world: World, num_ranks: int) -> None:
    names = [name for name, specimen in SPECIMENS.items() if specimen.is_from_torchvision]
    found = verdicts(world, names, tuple(AXES), num_ranks)
    said = {cell: verdict for cell, verdict in found.items() if verdict != "equal"}
    assert said.keys() == REFUSED.keys()
    for cell, verdict in said.items():
        assert verdict == REFUSED[cell].replace("mesh.tp 2", f"mesh.tp {num_ranks}")


def test_the_table_of_the_guide_names_every_model() -> None:
    page = GUIDE.read_text()
    table = page.partition(BEGIN)[2].partition(END)[0]
    assert [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:] == list(SPECIMENS)
    assert "FAILS" not in table
    assert "DIFFERS" not in table
