"""The doctor's paragraph says what is known, and nothing that is not."""

from __future__ import annotations

from torsh_distributed.launch.causes.diagnosis import diagnose
from torsh_distributed.launch.worker.rank_status import RankStatus, WaitingCall


def test_a_call_without_a_tensor_has_no_size() -> None:
    call = WaitingCall(op="barrier", group="0", sequence=4, num_bytes=-1, members=(0, 1), age_s=9.0, at="train.py:3")
    here = ('  File "train.py", line 9, in step',)
    found = diagnose({0: RankStatus(rank=0, waiting=call), 1: RankStatus(rank=1, stack=here)}, set(), num_ranks=2)
    assert found.is_stuck
    assert found.num_bytes is None
    assert "bytes" not in found.text
    assert "train.py:3" in found.text
