"""Rounds of our simulation, in a process of its own: prints what `pfl_rounds` prints."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from benchmarks import federated_digits as digits
from benchmarks.federated_tasks import Rounds
from benchmarks.process_usage import children_of, peak_together_bytes
from torsh_distributed.federated import FederatedConfig, RoundRecord, simulate


def main(num_rounds: int, num_workers: int) -> None:
    """Run and print."""
    torch.set_num_threads(1)
    times = []

    def on_round(record: RoundRecord) -> None:
        nonlocal began_s, peak_bytes
        times.append(time.perf_counter() - began_s)
        if record.round == num_rounds - 1:  # workers are alive still
            peak_bytes = peak_together_bytes([os.getpid(), *children_of(os.getpid())])
        began_s = time.perf_counter()

    began_s, peak_bytes = time.perf_counter(), 0
    config = FederatedConfig(rounds=num_rounds, clients_per_round=digits.PER_ROUND)
    result = simulate(
        Rounds(), num_clients=digits.NUM_CLIENTS, config=config, num_workers=num_workers, on_round=on_round
    )
    print(json.dumps({"times": times, "accuracy": digits.accuracy(result.model), "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
