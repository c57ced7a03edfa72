"""Which tensors are compressed, at which steps, and the number of a stream."""

from __future__ import annotations

import pytest

from torsh_distributed.compress.compressor_state import is_dense_step, stream_of, travels_dense
from torsh_distributed.plan import CompressConfig


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"method": "int8", "warmup_steps": 2}, "ddcccc"),
        ({"method": "int8", "warmup_steps": 1, "period": 2}, "dcdcdc"),
        ({"method": "none", "warmup_steps": 0}, "dddddd"),
    ],
    ids=["warm-up", "period after warm-up", "no method"],
)
def test_dense_steps_are_warm_up_and_those_between_compressed_ones(settings: dict[str, object], expected: str) -> None:
    config = CompressConfig.model_validate(settings)
    assert "".join("d" if is_dense_step(config, step) else "c" for step in range(6)) == expected


def test_small_tensors_and_skipped_names_are_never_compressed() -> None:
    config = CompressConfig(method="int8", skip_below_numel=100, skip_names=("*norm*",))
    assert travels_dense(config, "layer.weight", 99)
    assert travels_dense(config, "layer.norm.weight", 1000)
    assert not travels_dense(config, "layer.weight", 100)


def test_a_stream_depends_on_names_and_their_order() -> None:
    assert stream_of(["a", "b"]) == stream_of(iter(["a", "b"]))
    assert len({stream_of(names) for names in (["a", "b"], ["b", "a"], ["ab"], ["a"])}) == 4
