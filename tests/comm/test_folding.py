"""Folding two tensors or many, of every dtype, against integers and doubles that hold the result exactly."""

from __future__ import annotations

import pytest
import torch

from tests.comm.backends.ranks import ALL_DTYPES, assert_same, data, fold_reference, ops_for
from torsh_distributed.comm.backends.short_path import parse_reduction
from torsh_distributed.comm.folding import finish_fold, fold_all, fold_into
from torsh_distributed.comm.reduce_op import ReduceOp


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_many_tensors_fold_to_the_reference_and_stay_as_they_are(dtype: torch.dtype) -> None:
    tensors = [data((7,), dtype, rank) for rank in range(3)]
    before = [tensor.clone() for tensor in tensors]
    for op in ops_for(dtype):
        ours = parse_reduction(op, dtype)
        assert_same(fold_all(tensors, ours), fold_reference(tensors, op), f"{op} of {dtype}")
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_two_tensors_fold_in_place_in_either_order(dtype: torch.dtype) -> None:
    tensors = [data((7,), dtype, rank) for rank in range(2)]
    for op in ops_for(dtype):
        ours = parse_reduction(op, dtype)
        for is_incoming_first in (False, True):
            total = tensors[0].clone()
            fold_into(total, tensors[1], ours, is_incoming_first=is_incoming_first)
            finish_fold(total, ours, 2)
            assert_same(total, fold_reference(tensors, op), f"{op} of {dtype}")


def test_large_unsigned_numbers_keep_their_order() -> None:
    total = torch.tensor([2**63 + 5, 1], dtype=torch.uint64)
    fold_into(total, torch.tensor([7, 2**64 - 1], dtype=torch.uint64), ReduceOp.MAX)
    assert total.tolist() == [2**63 + 5, 2**64 - 1]


def test_a_mean_of_integers_drops_the_fraction_of_either_sign() -> None:
    assert fold_all([torch.tensor([-3, 3, 2**40]), torch.tensor([-4, 4, 1])], ReduceOp.MEAN).tolist() == [-3, 3, 2**39]
    large = torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert fold_all([large, torch.zeros_like(large)], ReduceOp.MEAN).tolist() == [2**63 - 1]


def test_the_first_operand_decides_the_bits_of_a_nan() -> None:
    bits = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    one, other = bits[:1].clone(), bits[1:].clone()
    fold_into(one, bits[1:], ReduceOp.SUM)
    fold_into(other, bits[:1], ReduceOp.SUM, is_incoming_first=True)
    assert one.view(torch.int32).equal(other.view(torch.int32))


def test_half_precision_rounds_once() -> None:
    tensors = [torch.tensor([2048.0], dtype=torch.float16), *[torch.ones(1, dtype=torch.float16)] * 4]
    assert fold_all(tensors, ReduceOp.SUM).item() == 2052  # 2048 + 1 rounds to 2048 in half precision
