"""Every sample goes to one client, and the parts differ as they should."""

from __future__ import annotations

import numpy as np
import pytest

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated import dirichlet_parts, iid_parts, label_parts, writer_parts

LABELS = np.random.default_rng(1).integers(10, size=2000).tolist()


def is_complete(parts: list[list[int]], num_samples: int) -> bool:
    return sorted(position for part in parts for position in part) == list(range(num_samples))


def skew(parts: list[list[int]]) -> float:
    """The mean share of a client's most frequent label."""
    return float(np.mean([max(np.bincount([LABELS[i] for i in part])) / len(part) for part in parts if part]))


def test_all_ways_give_every_sample_to_one_client_and_repeat_themselves() -> None:
    for make in (
        lambda seed: iid_parts(2000, 30, seed=seed),
        lambda seed: dirichlet_parts(LABELS, 30, alpha=0.3, seed=seed),
        lambda seed: label_parts(LABELS, 30, seed=seed),
    ):
        assert is_complete(make(0), 2000)
        assert make(0) == make(0) != make(1)


def test_even_parts_differ_by_one_sample_at_most() -> None:
    assert {len(part) for part in iid_parts(2000, 30)} == {66, 67}


def test_a_smaller_alpha_makes_clients_differ_more() -> None:
    even, mild, strong = (skew(dirichlet_parts(LABELS, 20, alpha=alpha)) for alpha in (100.0, 1.0, 0.05))
    assert even < 0.2 < mild < 0.6 < strong


def test_by_label_a_client_knows_few_labels() -> None:
    parts = label_parts(LABELS, 10, labels_per_client=2)
    assert max(len({LABELS[i] for i in part}) for part in parts) <= 4  # a shard may cross from one label to the next
    assert len(label_parts(LABELS, 3, labels_per_client=1)) == 3


def test_by_writer_samples_of_one_writer_stay_together() -> None:
    writers = np.random.default_rng(0).integers(40, size=500).tolist()
    parts = writer_parts(writers, 12)
    assert is_complete(parts, 500)
    homes = [{index for index, part in enumerate(parts) if any(writers[i] == who for i in part)} for who in range(40)]
    assert all(len(home) == 1 for home in homes)
    sizes = [len(part) for part in parts]
    assert max(sizes) < 2 * min(sizes)


def test_odd_requests_are_refused() -> None:
    for ask in (
        lambda: iid_parts(10, 0),
        lambda: dirichlet_parts([0, 1], 2, alpha=0.0),
        lambda: label_parts([0, 1], 2, labels_per_client=0),
        lambda: writer_parts(["a", "a", "b"], 3),
    ):
        with pytest.raises(InvalidArgument):
            ask()
