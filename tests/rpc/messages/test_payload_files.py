"""Memory files that carry payloads: filled again once the receiver's tensors are gone, and never before."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.rpc.messages.payload_files import PayloadFiles, ReceivedFiles, places_of

NUM_BYTES = 3 << 20


class BothEnds:
    """Sender and receiver in one process, and the number of the file that carried the last payload."""

    def __init__(self) -> None:
        self.sent, self.received = PayloadFiles(), ReceivedFiles()
        self.inode = 0

    def carry(self, value: int, num_bytes: int = NUM_BYTES) -> torch.Tensor:
        file = self.sent.send([memoryview(bytearray([value]) * num_bytes)])
        self.inode = os.fstat(file).st_ino
        places = places_of([num_bytes])
        return torch.from_numpy(self.received.open(file, places[-1])[places[0] : places[-1]])


def test_a_file_is_filled_again_once_its_tensors_are_gone() -> None:
    ends = BothEnds()
    inodes = set()
    for value in range(5):
        tensor = ends.carry(value, NUM_BYTES - value)
        inodes.add(ends.inode)
        assert torch.equal(tensor, torch.full((NUM_BYTES - value,), value, dtype=torch.uint8))
        tensor += 1  # the receiver may write to it
        del tensor
    assert len(inodes) == 1


def test_a_tensor_that_is_kept_stays_as_it_was_whatever_comes_after_it() -> None:
    ends = BothEnds()
    kept = [ends.carry(0)[10:20]]  # a view keeps all of it
    kept += [ends.carry(value) for value in range(1, 5)]
    for value, tensor in enumerate(kept):
        assert tensor.unique().tolist() == [value]
    del kept, tensor
    gc.collect()
    assert ends.carry(9).unique().tolist() == [9]


def test_a_file_that_a_child_process_may_see_is_not_filled_again() -> None:
    ends = BothEnds()
    tensor = ends.carry(1)
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(ready, 1)
        os._exit(int(bytes(tensor[:2].numpy()) != b"\x01\x01"))
    before = ends.inode
    del tensor
    ends.carry(2)
    assert ends.inode != before
    os.close(go)
    os.close(ready)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_is_idle_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = BothEnds()
    ends.carry(1)
    before = ends.inode
    ends.sent.drop_idle()
    ends.received.drop_idle()
    ends.carry(2)
    assert ends.inode == before, "it was used a moment ago"
    monkeypatch.setattr("torsh_distributed.rpc.messages.payload_files._KEPT_S", -1.0)
    ends.sent.drop_idle()
    ends.received.drop_idle()
    assert f" {before} " not in Path("/proc/self/maps").read_text()


def test_a_file_whose_size_can_change_is_refused_and_closed() -> None:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, NUM_BYTES)
    with pytest.raises(BadFrame, match="made shorter"):
        ReceivedFiles().open(file, NUM_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
