"""`deepspeed.init_distributed` in its forms: from the environment, at an address, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.bed.ports import free_port
from tests.bed.world import World
from torsh_distributed.migrate.deepspeed.initialize_group import init_distributed
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator


def sum_of_ranks(init_method: str, gives_place: bool) -> tuple[int, int, float]:
    """Runs on ranks that have no group; those of the world are in the environment."""
    import os

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    given = {"rank": rank, "world_size": world_size} if gives_place else {}
    init_distributed(dist_backend="gloo", init_method=init_method, dist_init_required=True, **given)
    init_distributed(dist_init_required=False)  # there is one
    value = torch.tensor(float(rank + 1))
    dist.all_reduce(value)
    group = dist.new_group(backend=get_accelerator().communication_backend_name())
    dist.all_reduce(value, group=group)
    return dist.get_rank(), dist.get_world_size(), float(value)


@pytest.mark.ranks
@pytest.mark.parametrize("gives_place", [True, False])
@pytest.mark.parametrize("form", ["tcp", "file", "env"])
def test_ranks_meet_where_the_script_says(world: World, tmp_path: Path, form: str, gives_place: bool) -> None:
    methods = {"tcp": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meeting", "env": "env://"}
    found = world.run(sum_of_ranks, methods[form], gives_place, num_ranks=2, backend=None, timeout_s=60)
    assert found == [(0, 2, 6.0), (1, 2, 6.0)]


def test_another_form_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        init_distributed(init_method="udp://somewhere", rank=0, world_size=1)
