from __future__ import annotations

import dataclasses
import pickle
import threading

import pytest

from torsh_distributed.clusters.hosted.rank_host import (
    HostFacts,
    own_facts,
    pack_function,
    require_fitting,
    visible_gpus,
)
from torsh_distributed.errors import ConfigurationError, SerializationError

HERE = own_facts("this program")


def host(name: str, **changes: object) -> HostFacts:
    return dataclasses.replace(HERE, name=name, **{"pid": hash(name), **changes})


def test_hosts_like_this_program_fit() -> None:
    major, minor, _ = HERE.python.split(".")
    require_fitting([host("a"), host("b", python=f"{major}.{minor}.99")], HERE, engine="ray")


@pytest.mark.parametrize(
    ("field", "value", "shown"), [("python", "3.99.1", "Python"), ("torch", "1.0", "torch"), ("torsh", "9", "torsh")]
)
def test_another_version_is_named_with_its_host(field: str, value: str, shown: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{shown}.* is .* here and {value} on worker-b"):
        require_fitting([host("worker-a"), host("worker-b", **{field: value})], HERE, engine="ray")


def test_two_ranks_in_one_process_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a and b are threads of one process"):
        require_fitting([host("a", pid=7), host("b", pid=7)], HERE, engine="dask")


def test_ranks_of_a_node_see_all_its_gpus_their_own_at_their_local_rank() -> None:
    hosts = [host("a", node="x", gpus=("3",)), host("b", node="x", gpus=("1",)), host("c", node="y", gpus=("3",))]
    assert [visible_gpus(hosts, rank) for rank in range(3)] == ["3,1", "3,1", "3"]
    assert visible_gpus([host("d")], 0) is None


pytestmark = pytest.mark.needs_library("cloudpickle")


def test_a_local_function_travels_with_what_it_uses() -> None:
    factor = 3
    work = pack_function(lambda value: value * factor, (4,), {}, pickler="cloudpickle")
    function, args, kwargs = pickle.loads(work.packed)
    assert function(*args, **kwargs) == 12


def test_what_does_not_pickle_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"argument 1 \(lock\) does not pickle"):
        pack_function(print, (1, lock), {}, pickler="cloudpickle")
    with pytest.raises(SerializationError, match="argument 'guard'"):
        pack_function(print, (), {"guard": lock}, pickler="cloudpickle")
    with pytest.raises(SerializationError, match="'lock', which it uses from around it"):
        pack_function(lambda: lock, (), {}, pickler="cloudpickle")
