"""What published scripts import from corners of DeepSpeed, and use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torsh_distributed.migrate.deepspeed.surface import script_imports as given


def test_hosts_are_read_and_chosen_as_by_deepspeeds_launcher(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    assert given.fetch_hostfile(str(path)) is None
    path.write_text("one slots=2\ntwo slots=4\n")
    pool = given.fetch_hostfile(str(path))
    assert pool == {"one": 2, "two": 4}
    assert given.parse_inclusion_exclusion(pool, "", "") == {"one": [0, 1], "two": [0, 1, 2, 3]}
    assert given.parse_inclusion_exclusion(pool, "two:0,2", "") == {"two": [0, 2]}
    assert given.parse_inclusion_exclusion(pool, "", "one@two:1") == {"two": [0, 2, 3]}
    with pytest.raises(AssertionError, match="mutually exclusive"):
        given.parse_inclusion_exclusion(pool, "one", "two")


class OldMpu:
    def get_model_parallel_rank(self) -> int:
        return 3

    def get_slice_parallel_world_size(self) -> int:
        return 4


def test_layers_are_whole_unless_an_mpu_says_otherwise() -> None:
    assert (given.bwc_tensor_model_parallel_rank(), given.bwc_tensor_model_parallel_world_size()) == (0, 1)
    mpu = OldMpu()
    assert (given.bwc_tensor_model_parallel_rank(mpu), given.bwc_tensor_model_parallel_world_size(mpu)) == (3, 4)
    tokens = torch.ones(2)
    assert given.drop_tokens(tokens) is given.gather_tokens(tokens) is tokens
    assert given.remove_random_ltd_state_dict({"weight": tokens}) == {"weight": tokens}
