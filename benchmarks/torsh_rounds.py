"""Rounds of our simulation, in a process of its own: prints what `pfl_rounds` prints."""

from __future__ import annotations

import json
import resource
import sys
import time

import torch

from benchmarks import federated_digits as digits
from benchmarks.federated_tasks import Rounds
from torsh_distributed.federated import FederatedConfig, RoundRecord, simulate


def main(num_rounds: int, num_workers: int) -> None:
    """Run and print."""
    torch.set_num_threads(1)
    times = []

    def on_round(record: RoundRecord) -> None:
        nonlocal began_s
        times.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()

    began_s = time.perf_counter()
    config = FederatedConfig(rounds=num_rounds, clients_per_round=digits.PER_ROUND)
    result = simulate(
        Rounds(), num_clients=digits.NUM_CLIENTS, config=config, num_workers=num_workers, on_round=on_round
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if num_workers > 1:
        peak += num_workers * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # the largest, for each
    print(json.dumps({"times": times, "accuracy": digits.accuracy(result.model), "peak_bytes": peak * 1024}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
