"""What of FairScale is not here says so when it is imported, and what to use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from torsh_distributed.migrate.stand_in import install, uninstall


@pytest.fixture
def _fairscale() -> Iterator[None]:
    install("fairscale")
    yield
    uninstall("fairscale")


@pytest.mark.usefixtures("_fairscale")
@pytest.mark.parametrize(
    ("statement", "use"),
    [
        ("from fairscale.nn import FlattenParamsWrapper", "FSDP2 shards each parameter"),
        ("from fairscale.nn.misc import FlattenParamsWrapper", "FSDP2 shards each parameter"),
        ("from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper", "FSDP2 shards each parameter"),
        ("from fairscale.nn import MOELayer", "td.MoELayer"),
        ("from fairscale.nn.moe import MOELayer, Top2Gate", "td.MoELayer"),
        ("from fairscale.nn.moe.top2gate import Top2Gate", "td.MoELayer"),
        ("from fairscale.nn.pipe import AsyncPipe", "mesh.pp"),
        ("from fairscale.nn.pipe.rpc import PipeRPCWrapper", "mesh.pp"),
        ("from fairscale.optim.adam import Adam", "torch.optim.Adam"),
        ("import fairscale.experimental.nn", "not here"),
    ],
)
def test_importing_a_name_that_is_not_here_says_what_to_use(statement: str, use: str) -> None:
    with pytest.raises(ImportError, match="is not part of torsh_distributed's fairscale") as caught:
        exec(statement, {})
    assert use in str(caught.value)
    assert "which has:" not in str(caught.value)


@pytest.mark.usefixtures("_fairscale")
def test_the_old_place_of_the_checkpoint_wrapper_is_there() -> None:
    misc = importlib.import_module("fairscale.nn.misc")
    assert misc.checkpoint_wrapper is importlib.import_module("fairscale.nn").checkpoint_wrapper
