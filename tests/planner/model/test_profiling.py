"""A model's profile: counted without memory, equal to what a real run of the model shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.planner.live_memory import batch_for, char_gpt, wide
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.planner.model.model_profile import Held, ModelProfile
from torsh_distributed.planner.model.model_source import find_model
from torsh_distributed.planner.model.profiling import profile_model


def saved_bytes(profile: ModelProfile, num_samples: int) -> float:
    parts = [
        profile.before.saved,
        *(block.saved for block in profile.chain()),
        profile.after.saved,
        profile.shared_saved,
    ]
    return sum(amount.at(num_samples) for part in parts for amount in part.values())


def really_saved(model: nn.Module, num_samples: int) -> int:
    """What autograd keeps of a real forward and loss, each storage once, without parameters."""
    inputs, targets = batch_for(model, num_samples)
    outside = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), inputs, targets)}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(inputs)
        loss = functional.cross_entropy(out.flatten(0, -2), targets.flatten())
    del loss
    return sum(found.values())


@pytest.mark.parametrize("build", [char_gpt, wide])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_saved_bytes_are_those_of_a_real_forward(build: object, num_samples: int) -> None:
    model = build()  # type: ignore[operator]
    assert saved_bytes(profile_model(model), num_samples) == pytest.approx(really_saved(model, num_samples), rel=0.02)


def test_a_batch_norm_that_refuses_one_sample_is_no_obstacle() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    profile = profile_model(model, example=(torch.zeros(4, 8),))
    forward = sum(part.forward_flops.at(6) for part in (profile.before, *profile.chain(), profile.after))
    assert forward == pytest.approx(6 * 2 * (8 * 16 + 16 * 4))


@pytest.mark.parametrize("build", [char_gpt, wide])
def test_operations_are_those_of_torchs_counter(build: object) -> None:
    model = build()  # type: ignore[operator]
    inputs, targets = batch_for(model, 3)
    with FlopCounterMode(display=False) as counter:
        functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
    expected = counter.get_total_flops()
    counted = profile_model(model).step_flops(3)
    # torch's counter knows attention on GPUs only: two products, and twice as many in backward.
    attention = 0 if build is wide else 4 * 3 * 3 * 4 * 64 * 64 * 96
    first = 2 * 3 * 64 * 512 if build is wide else 0  # inputs need no gradient
    assert counted == pytest.approx(expected + attention, rel=0.01) or counted == pytest.approx(
        expected + first, rel=0.01
    )


def test_the_model_is_as_before() -> None:
    model = char_gpt().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = set(vars(model.blocks[0]))
    profile_model(model)
    assert set(vars(model.blocks[0])) == names
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def test_equal_blocks_are_traced_once() -> None:
    profile = profile_model(char_gpt())
    assert (len(profile.blocks), profile.num_blocks) == (1, 4)
    assert profile.all_params.numel() == sum(param.numel() for param in char_gpt().parameters())


def test_what_tensor_parallelism_splits_is_known() -> None:
    block = profile_model(char_gpt()).blocks[0]
    samples, tokens, width = 2, 64, 96
    hidden = samples * tokens * width * 4
    split = block.saved[Held.SPLIT].at(samples)
    # Queries, keys, values and the attention's result; the inner values of the feed-forward layer twice, around GELU.
    assert split == pytest.approx((3 + 1 + 2 * 4) * hidden, rel=0.05)
    assert block.params.numel(tp=2) < 0.52 * block.params.numel()


class Frozen(nn.Module):
    """A frozen body with a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(32, 4)
        self.body.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(features))
        return out


def test_frozen_layers_keep_nothing_and_have_no_backward() -> None:
    profile = profile_model(Frozen())
    block = profile.blocks[0]
    assert not block.saved
    assert block.total_flops == block.forward_flops
    assert profile.all_params.numel(trained_only=True) == 32 * 4 + 4


def test_a_tied_head_counts_once() -> None:
    model = char_gpt()
    model.head.weight = model.token.weight
    profile = profile_model(model)
    assert profile.tied_numel == model.token.weight.numel()
    assert profile.all_params.numel() == sum(param.numel() for param in model.parameters())


class ByValue(nn.Module):
    """Goes another way for large values."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.one(features) if features.sum() > 0 else self.two(features)
        return out


def test_a_model_whose_way_depends_on_values_is_refused_in_words() -> None:
    with pytest.raises(InvalidArgument, match=r"ByValue cannot be planned without values(.|\n)*hint"):
        profile_model(ByValue())


def test_a_forward_of_several_arguments_needs_an_example() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            out: Tensor = self.layer(one + two)
            return out

    with pytest.raises(InvalidArgument, match="no inputs can be made for Two: its forward takes one, two"):
        profile_model(Two())
    profile = profile_model(Two(), example=(torch.zeros(1, 8), torch.zeros(1, 8)))
    assert profile.step_flops(1) == 2 * 2 * 8 * 8, "no gradient of the inputs"


def test_copies_of_weights_are_kept_apart() -> None:
    profile = profile_model(char_gpt(), Plan(precision={"dtype": "bf16"}))
    block = profile.blocks[0]
    matrices = sum(param.numel() for param in char_gpt().blocks[0].parameters() if param.dim() == 2)
    assert block.saved[Held.WEIGHTS].at(1) == pytest.approx(2 * matrices, rel=0.02)
    assert block.saved[Held.WEIGHTS].per_sample == 0


@pytest.mark.needs_library("transformers")
def test_a_model_of_seven_billion_is_traced_by_one_block() -> None:
    found = find_model("llama")
    profile = profile_model(found.model, Plan(precision={"dtype": "bf16"}), sequence=2048)
    assert (len(profile.blocks), profile.num_blocks) == (1, 32)
    assert profile.all_params.numel() == pytest.approx(6.74e9, rel=0.01)
    # Six for each parameter that multiplies and token, and attention.
    assert profile.step_flops(1) == pytest.approx(6 * 6.6e9 * 2048 * 1.05, rel=0.1)


class InPlace(nn.Module):
    """Blocks that change their input, and what another block returned, as residual networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(32, 32), nn.ReLU(inplace=True)) for _ in range(3)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(values + 0)
            out += values
            values = out
        result: Tensor = self.head(values)
        return result


def test_blocks_and_what_is_between_them_may_change_tensors_in_place() -> None:
    profile = profile_model(InPlace(), example=(torch.zeros(1, 32),))
    assert profile.num_blocks == 3
    assert profile.chain()[0].forward_flops.at(1) == 2 * 32 * 32


def test_a_forward_that_refuses_the_inputs_that_were_made_is_a_sentence_with_them() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, values: Tensor) -> Tensor:
            out: Tensor = self.layer(values.reshape(len(values), 2, 9))
            return out

    with pytest.raises(InvalidArgument, match=r"Picky does not run on values 8: RuntimeError(.|\n)*module:function"):
        profile_model(Picky())


def test_a_model_without_trained_parameters_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has no parameter that is trained"):
        profile_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False))


def test_inputs_that_do_not_fit_are_told_without_a_log_of_torch(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgument, match="does not run on input 9"):
        profile_model(nn.Linear(8, 8), example=(torch.zeros(1, 9),))
    assert capfd.readouterr().err == ""
