"""The models people bring, on every axis: losses of one process, or a refusal that says why."""

from __future__ import annotations

import pytest

from tests.bed.world import World
from tests.parallel.models.model_matrix import AXES, BEGIN, END, GUIDE, cells_of, page_of, verdicts
from tests.parallel.models.verdict_record import found_in, read_record
from tests.parallel.models.zoo import SPECIMENS

pytestmark = pytest.mark.needs_library("transformers")

SHORT = (
    ("Llama", "tp"),
    ("GPT-2", "tp"),
    ("BERT", "tp"),
    ("T5", "tp"),
    ("DeepSeek-V3", "tp"),
    ("Qwen3-MoE", "ep"),
    ("Mixtral", "pp"),
    ("Mistral", "cp"),
    ("gpt-oss", "cp"),
    ("T5", "pp"),
)
NO_POSITIONS = "has no value for each position, so its loss is not a mean over positions"
NO_TABLE = "no table of positions was found in the model"
REFUSED = {
    ("ResNet-18", "cp"): NO_TABLE,
    ("torchvision ViT", "cp"): NO_TABLE,
    ("Swin", "cp"): NO_TABLE,
    ("ResNet-18", "tp"): "found no layer that tensor parallelism can split",
    ("T5", "pp"): "T5ForConditionalGeneration is an encoder and a decoder: its layers are two chains",
    ("T5", "cp"): "T5ForConditionalGeneration is an encoder and a decoder with sequences of their own",
    ("ViT", "cp"): "makes its sequence itself from pixel_values",
    ("BLOOM", "cp"): "transformer.h.0 of BloomForCausalLM mixes positions in another way",
    ("GPT-Neo", "cp"): "transformer.h.0 of GPTNeoForCausalLM mixes positions in another way",
    ("Falcon", "cp"): "transformer.h.0 of FalconForCausalLM mixes positions in another way",
    ("BERT", "cp"): NO_POSITIONS,
}


def require_equal_or_refused(found: dict[tuple[str, str], str]) -> None:
    for cell, verdict in found.items():
        if cell in REFUSED:
            assert verdict.startswith("refused: "), (cell, verdict)
            assert REFUSED[cell] in verdict, (cell, verdict)
        else:
            assert verdict == "equal", (cell, verdict)


@pytest.mark.matrix
def test_a_few_models_train_as_one_process_does(world: World) -> None:
    require_equal_or_refused(verdicts(world, SHORT, 2))


@pytest.mark.matrix
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name, one in SPECIMENS.items() if not one.is_from_torchvision])
def test_a_model_of_transformers_trains_as_one_process_does_on_every_axis(
    world: World, name: str, num_ranks: int
) -> None:
    require_equal_or_refused(verdicts(world, cells_of([name], tuple(AXES)), num_ranks))


@pytest.mark.matrix
@pytest.mark.needs_torchvision
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name, one in SPECIMENS.items() if one.is_from_torchvision])
def test_a_model_of_torchvision_trains_as_one_process_does(world: World, name: str, num_ranks: int) -> None:
    require_equal_or_refused(verdicts(world, cells_of([name], tuple(AXES)), num_ranks))


def test_the_table_of_the_guide_is_that_of_the_record() -> None:
    record = read_record()
    page = GUIDE.read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == page_of(record).strip(), (
        "write it: python -m tests.parallel.models --models --write"
    )
    found = found_in(record)
    names = [name for name, one in SPECIMENS.items() if not one.is_from_torchvision]
    for num_ranks in (2, 4):
        assert set(cells_of(names, tuple(AXES))) <= found[num_ranks].keys()
        require_equal_or_refused(found[num_ranks])
