"""Backends: capabilities found by trying, names never mapped to something else."""

from __future__ import annotations

import pytest
import torch

from torsh_distributed.comm.backends import capabilities
from torsh_distributed.comm.backends.capabilities import BackendType, choose_backend, probe_capabilities
from torsh_distributed.comm.backends.handles import FinishedWork
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument


def test_gloo_is_probed_op_by_op() -> None:
    found = probe_capabilities(BackendType.GLOO)
    assert found.is_available
    assert found.supports(ReduceOp.SUM, torch.float32)
    assert found.supports(ReduceOp.BAND, torch.int32)
    assert not found.supports(ReduceOp.BAND, torch.float32)
    assert not found.supports(ReduceOp.MEAN, torch.int64)


@pytest.mark.parametrize("backend", ["gloo", BackendType.SHM, BackendType.TORSH])
def test_two_ranks_show_whether_collectives_wait_and_messages_arrive(backend: BackendType | str) -> None:
    found = probe_capabilities(backend)
    assert (found.is_asynchronous, found.has_messages) == (True, True)


def test_a_backend_that_waits_or_loses_messages_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waits:
        """Reduces at once and drops what is sent."""

        def allreduce(self, *_: object) -> FinishedWork:
            return FinishedWork()

        send = recv = allreduce

    monkeypatch.setattr(capabilities, "_member", lambda *_: Waits())
    assert capabilities._tried_by_two(BackendType.GLOO) == (False, False)


def test_what_two_threads_cannot_try_stays_unknown() -> None:
    found = probe_capabilities(BackendType.FAKE)
    assert (found.is_asynchronous, found.has_messages) == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for the answer of a machine without a GPU")
def test_what_is_missing_is_said() -> None:
    found = probe_capabilities(BackendType.NCCL)
    assert not found.is_available
    assert found.reason
    with pytest.raises(FeatureNotAvailable, match=found.reason):
        choose_backend("nccl")
    with pytest.raises(FeatureNotAvailable, match="nccl"):
        choose_backend("cpu:gloo,cuda:nccl")


def test_an_unknown_name_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'gloo'"):
        BackendType.parse("glooo")


@pytest.mark.parametrize(("text", "op"), [("sum", ReduceOp.SUM), ("AVG", ReduceOp.MEAN), ("Average", ReduceOp.MEAN)])
def test_reductions_are_known_by_their_usual_names(text: str, op: ReduceOp) -> None:
    assert ReduceOp.parse(text) is op


def test_an_unknown_reduction_lists_the_known() -> None:
    with pytest.raises(InvalidArgument, match="use one of: sum, product, min, max, band, bor, bxor, mean"):
        ReduceOp.parse("median")


@pytest.mark.parametrize(
    ("op", "dtype", "fits"),
    [
        (ReduceOp.MEAN, torch.int32, False),
        (ReduceOp.MEAN, torch.bfloat16, True),
        (ReduceOp.BXOR, torch.float32, False),
        (ReduceOp.BXOR, torch.bool, True),
        (ReduceOp.MAX, torch.complex64, False),
        (ReduceOp.SUM, torch.complex64, True),
    ],
)
def test_pairs_without_meaning_are_refused_before_sending(op: ReduceOp, dtype: torch.dtype, fits: bool) -> None:
    if fits:
        op.check(dtype)
    else:
        with pytest.raises(InvalidArgument, match="is not defined for"):
            op.check(dtype)
