"""What compression sends: bytes counted at the interface, against the codec's own count."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed import needs
from tests.bed.world import World
from tests.lab.network import Host, Lab
from torsh_distributed.compress.codecs import codec_names, make_codec
from torsh_distributed.compress.codecs.base import Key

_PARAMETERS = {"topk": ":0.01", "randomk": ":0.01", "bernoulli": ":0.01", "layerwise": ":0.01", "threshold": ":2.6"}
_NUM_LAYERS, _WIDTH = 8, 1024
_HEADER_BYTES = 66  # Ethernet 14, IP 20, TCP 20 and its timestamps 12: once for each packet the interface counts


def _average(method: str, num_rounds: int) -> int:
    """Average gradients of 8.4 M parameters repeatedly; returns the bytes this rank counted in the last round."""
    codec, group = make_codec(method), dist.group.WORLD
    assert group is not None
    codec.set_shapes(0, [(_WIDTH, _WIDTH)] * _NUM_LAYERS)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(_NUM_LAYERS * _WIDTH * _WIDTH, generator=generator)
    sent = 0
    for step in range(num_rounds):
        sent = codec.average(x, group, Key(step=step, rank=dist.get_rank())).num_bytes
    return sent


def _measured(world: World, hosts: list[Host], method: str, few: int, many: int) -> tuple[float, float]:
    """Bytes per round that left a host, without headers, and that its rank counted: means over hosts.

    Two runs of different length, so what they have in common (rendezvous, connecting) cancels out.
    """
    left = []
    for num_rounds in (few, many):
        before = [host.counters() for host in hosts]
        counted = world.run(
            _average, method, num_rounds, num_ranks=len(hosts), backend="gloo", hosts=hosts, timeout_s=300
        )
        sent = [host.counters() - start for host, start in zip(hosts, before, strict=True)]
        left.append(sum(one.tx_bytes - _HEADER_BYTES * one.tx_packets for one in sent))
    return (left[1] - left[0]) / (many - few) / len(hosts), sum(counted) / len(hosts)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    missing = needs.netns()
    if missing:
        yield Note(text=f"Not measured here: {missing}.")
        return
    methods = ["int8"] if budget.is_quick else [f"{name}{_PARAMETERS.get(name, '')}" for name in codec_names()]
    world = World()
    try:
        for num_ranks in (2,) if budget.is_quick else (2, 4):
            with Lab() as lab:
                hosts = lab.hosts(num_ranks)
                for method in methods:
                    measured, counted = _measured(world, hosts, method, 1, 2 if budget.is_quick else 4)
                    yield Row(
                        name=f"{method}, {num_ranks} hosts",
                        unit=Unit.BYTES,
                        ours=Measurement.of([measured]),
                        rivals={"formula": Measurement.of([counted])},
                    )
    finally:
        world.close()


CASE = Case(
    title="Bytes on the wire",
    about="""One average of 8.4 M gradients (33.6 MB), one rank per host. torsh is what left a host's interface, by the
    kernel's counters, without packet headers (66 bytes each); the formula is the codec's own count. Their ratio
    should be near 1.""",
    rows=_rows,
)
