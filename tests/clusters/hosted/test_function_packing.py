from __future__ import annotations

import pickle
import threading

import pytest

from torsh_distributed.clusters.hosted.function_packing import pack_function
from torsh_distributed.errors import SerializationError

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
