"""torch's names: the same calls as with torch, over what was exposed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.rpc import exposed_functions as there
from torsh_distributed import rpc
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, OperationTimeout


@pytest.fixture
def _alone(tmp_path: Path) -> Iterator[None]:
    """A world of one worker, which calls itself."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    yield
    rpc.shutdown()
    there.kept.clear()


@pytest.mark.usefixtures("_alone")
def test_calls_and_futures_are_those_of_torch() -> None:
    assert rpc.rpc_sync("me", there.add, args=(torch.ones(2), 3)).tolist() == [4.0, 4.0]
    futures = [rpc.rpc_async("me", there.add, args=(i,), kwargs={"right": 1}) for i in range(3)]
    assert torch.futures.wait_all(futures) == [1, 2, 3]
    chained = rpc.rpc_async(0, there.add, args=(1, 2)).then(lambda done: done.wait() * 10)
    assert chained.wait() == 30
    failed = rpc.rpc_async("me", there.fail, args=("value",))
    with pytest.raises(ValueError, match="a value error"):
        failed.wait()
    with pytest.raises(OperationTimeout):
        rpc.rpc_sync("me", there.slow, args=(0.5,), timeout=0.05)
    assert rpc.get_worker_info().name == rpc.get_worker_info("me").name == "me"


@pytest.mark.usefixtures("_alone")
def test_references_have_torchs_methods() -> None:
    counter = rpc.remote("me", there.Counter, args=(5,))
    assert counter.owner().name == counter.owner_name() == "me"
    assert counter.rpc_sync().increase(2) == 7
    assert counter.rpc_async().increase(by=3).wait() == 10
    assert counter.remote().increase().to_here() == 11
    assert counter.to_here().value == counter.local_value().value == 11  # at the owner it is the object itself
    own = rpc.RRef([1, 2])
    assert own.is_owner()
    assert own.local_value() == [1, 2]
    assert rpc.rpc_sync("me", there.echo, args=(own,)).local_value() is own.local_value()


@pytest.mark.usefixtures("_alone")
def test_autograd_across_calls_is_refused_in_words() -> None:
    with pytest.raises(FeatureNotAvailable, match="autograd across remote calls"):
        rpc.RRef(torch.ones(1)).backward()


def test_options_that_have_no_meaning_are_refused() -> None:
    with pytest.raises(FeatureNotAvailable, match="maps of devices"):
        rpc.init_rpc("x", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(device_maps={"a": {0: 1}}))
    with pytest.raises(ConfigurationError, match="init_method"):
        rpc.init_rpc("x", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method="redis://x"))
    assert not rpc.is_started()


def test_async_execution_is_for_functions() -> None:
    with pytest.raises(ValueError, match="for functions"):
        rpc.functions.async_execution(3)  # type: ignore[type-var]
