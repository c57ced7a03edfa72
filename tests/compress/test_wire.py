"""What a codec says it sends is what crosses the link, by the counters of the interface."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed.compress.codecs import make_codec
from torsh_distributed.compress.codecs.base import Key

METHODS = ["none", "bf16", "int8", "nbit:4", "nbit:3", "sign", "ternary", "bimodal:2", "natural"]
NUM_ELEMENTS = 2_000_000


HEADER_BYTES = 66  # Ethernet 14, IP 20, TCP 20 and its timestamps 12: once for each packet the interface counts


def sent_on_eth0() -> int:
    """Bytes sent since the interface came up, without headers, as this process's network namespace counts them."""
    (line,) = (line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("eth0:"))
    columns = line.partition(":")[2].split()
    num_bytes, num_packets = int(columns[8]), int(columns[9])
    return num_bytes - HEADER_BYTES * num_packets


def measure(methods: list[str]) -> dict[str, tuple[int, int]]:
    """Runs on every rank: bytes counted by the codec, and by the interface."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(group.rank()))
    found = {}
    for method in methods:
        codec = make_codec(method)
        codec.average(x, group, Key())  # ranks compare settings the first time
        sent = []
        for step in (1, 2):  # a packet that a busy machine sends twice is counted twice, so the lesser is right
            before = sent_on_eth0()
            counted = codec.average(x, group, Key(step=step)).num_bytes
            dist.barrier()
            sent.append(sent_on_eth0() - before)
        found[method] = counted, min(sent)
    return found


def test_the_interface_counts_what_the_codec_counts(world: World, lab: Lab) -> None:
    for found in world.run(measure, METHODS, hosts=lab.hosts(2), backend="gloo", timeout_s=60):
        dense = found["none"][1]
        for method in METHODS:
            counted, measured = found[method]
            expected = make_codec(method).payload_bytes(NUM_ELEMENTS)  # 2 (P - 1) / P of it, with two ranks
            assert expected is not None
            assert abs(counted / expected - 1) < 0.01, method
            assert abs(measured - counted) < 0.02 * counted + 4000, method
            assert abs(measured / dense / (expected / (4 * NUM_ELEMENTS)) - 1) < 0.05, method
