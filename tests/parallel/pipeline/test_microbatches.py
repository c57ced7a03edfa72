"""Microbatches weigh as much as the labels in them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from torsh_distributed.errors import TensorShapeMismatch
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts
from torsh_distributed.parallel.pipeline.microbatches import Microbatches
from torsh_distributed.train.losses.loss_kind import MeanOfLabels


def test_losses_of_microbatches_add_up_to_that_of_the_batch() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    targets[0] = targets[1] = -100  # a microbatch without labels
    targets[2, 1:] = -100
    parts = Microbatches()
    parts.load({"logits": logits, "ids": torch.arange(5)[None], "number": 3}, targets, 3)
    total = torch.zeros(())
    for number in range(3):
        parts.current = number
        assert parts.inputs["ids"].shape == (1, 5)
        assert parts.inputs["number"] == 3
        assert parts.first_row(2) == 2 * number
        loss = functional.cross_entropy(parts.inputs["logits"].flatten(0, 1), parts.targets.flatten())
        total += loss * parts.weight
    torch.testing.assert_close(total, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_labels_that_the_loss_shifts_are_counted_so() -> None:
    labels = torch.full((4, 3), -100)
    labels[0, 0] = labels[1, 1] = labels[2, 2] = labels[3, 1] = 1  # the first label of a row is never used
    parts = Microbatches()
    parts.load({"labels": labels}, None, 4, shifts=True)
    weights = []
    for number in range(4):
        parts.current = number
        weights.append(float(parts.weight))
    assert weights == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])
    parts.load({"labels": torch.randn(4, 1)}, None, 4)
    assert parts.weight == 0.25


def test_labels_of_a_traced_model_are_found_by_their_place() -> None:
    features, labels = torch.randn(4, 3), torch.tensor([1, 2, -100, -100])
    kind = MeanOfLabels(("y",), LabelRule(-100))
    parts = Microbatches()
    parts.counts = PartCounts(kind.count, kind.guarded)
    parts.load({"0": features, "1": labels}, None, 2, batch={"x": features, "y": labels})
    assert [*parts.inputs] == ["0", "1"]
    assert parts.weight == 1
    parts.current = 1
    assert parts.weight == 0
    assert parts.inputs["1"].max() >= 0, "one label counts, so the loss is a number"


def test_rows_that_do_not_divide_are_refused() -> None:
    with pytest.raises(TensorShapeMismatch, match="num_microbatches 4 does not divide the batch of 6"):
        Microbatches().load({"x": torch.zeros(6, 2)}, None, 4)
