"""Ways to divide samples among virtual clients. All return positions of samples, one list for each client.

Every sample goes to one client. Pure: the same arguments give the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torsh_distributed.errors import InvalidArgument

Parts = list[list[int]]


def iid_parts(num_samples: int, num_clients: int, *, seed: int = 0) -> Parts:
    """Shuffled and dealt out evenly: every client's data look alike."""
    _require_clients(num_clients)
    order = np.random.default_rng(seed).permutation(num_samples)
    return [part.tolist() for part in np.array_split(order, num_clients)]


def dirichlet_parts(labels: Sequence[int], num_clients: int, *, alpha: float, seed: int = 0) -> Parts:
    """Each label's samples are divided by shares from a Dirichlet distribution: the smaller alpha, the less alike."""
    _require_clients(num_clients)
    if not alpha > 0:
        raise InvalidArgument("alpha must be above 0; small values make clients differ", alpha=alpha)
    generator = np.random.default_rng(seed)
    parts: Parts = [[] for _ in range(num_clients)]
    for positions in _by_value(labels).values():
        generator.shuffle(positions)
        shares = generator.dirichlet(np.full(num_clients, alpha))
        ends = np.round(np.cumsum(shares) * len(positions)).astype(int)
        ends[-1] = len(positions)
        for part, chosen in zip(parts, np.split(positions, ends[:-1]), strict=True):
            part.extend(chosen.tolist())
    return parts


def label_parts(labels: Sequence[int], num_clients: int, *, labels_per_client: int = 2, seed: int = 0) -> Parts:
    """Sorted by label and cut into shards, of which each client gets `labels_per_client`: it knows few labels."""
    _require_clients(num_clients)
    if labels_per_client < 1:
        raise InvalidArgument("a client needs at least one label", labels_per_client=labels_per_client)
    generator = np.random.default_rng(seed)
    order = np.concatenate([generator.permutation(positions) for positions in _by_value(labels).values()])
    shards = np.array_split(order, num_clients * labels_per_client)
    dealt = generator.permutation(len(shards)).reshape(num_clients, labels_per_client)
    return [np.concatenate([shards[index] for index in own]).tolist() for own in dealt]


def writer_parts(writers: Sequence[Any], num_clients: int) -> Parts:
    """By who made the samples: a writer's samples stay together, and writers go to the client with the fewest."""
    _require_clients(num_clients)
    by_writer = _by_value(writers)
    if len(by_writer) < num_clients:
        raise InvalidArgument(
            "there are fewer writers than clients", num_writers=len(by_writer), num_clients=num_clients
        )
    parts: Parts = [[] for _ in range(num_clients)]
    for positions in sorted(by_writer.values(), key=len, reverse=True):
        min(parts, key=len).extend(positions.tolist())
    return parts


def _by_value(values: Sequence[Any]) -> dict[Any, NDArray[np.int64]]:
    """Positions by value, values in order."""
    found, inverse = np.unique(np.asarray(values), return_inverse=True)
    return {value: np.flatnonzero(inverse == index) for index, value in enumerate(found.tolist())}


def _require_clients(num_clients: int) -> None:
    if num_clients < 1:
        raise InvalidArgument("there must be at least one client", num_clients=num_clients)
