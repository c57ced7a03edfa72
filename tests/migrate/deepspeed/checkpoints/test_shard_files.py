"""Which files a directory has: one that was saved under the stand-in is named as what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed.checkpoints.shard_files import find_files


def test_a_checkpoint_of_ours_is_not_taken_for_a_damaged_one_of_theirs(tmp_path: Path) -> None:
    tag = tmp_path / "global_step6"
    tag.mkdir()
    (tmp_path / "latest").write_text(tag.name)
    with pytest.raises(CheckpointError, match="is not a checkpoint of DeepSpeed"):
        find_files(tmp_path)
    (tag / "step-00000006").mkdir()
    with pytest.raises(CheckpointError, match="a checkpoint of this library already") as caught:
        find_files(tmp_path)
    assert "torsh checkpoint export" in str(caught.value.hint)
