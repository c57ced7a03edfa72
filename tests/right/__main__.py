"""Draws trainings and prints each that is not equal: `python -m tests.right --seed 1000 --cases 100`."""

from __future__ import annotations

import argparse
import collections
import time
from pathlib import Path

from tests.bed.world import World
from tests.right.case_runs import in_short, verdicts_here
from tests.right.training_case import draw_case


def main() -> None:
    """Run the cases one by one, so that one that hangs or dies is known by its number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the first case; default: by the clock")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--all", action="store_true", help="print equal ones too")
    parser.add_argument("--record", action="store_true", help="keep the verdicts in verdicts.txt")
    parser.add_argument("--step", type=int, default=1, help="take each such case: to divide them among processes")
    options = parser.parse_args()
    first = int(time.time()) % 1_000_000 * 1000 if options.seed is None else options.seed
    print(f"cases {first} to {first + options.cases - 1}")
    counts: collections.Counter[str] = collections.Counter()
    lines: list[str] = []
    world = World()
    try:
        for seed in range(first, first + options.cases, options.step):
            case = draw_case(seed)
            outcomes = world.outcomes(verdicts_here, [case], num_ranks=case.num_ranks, backend="torsh", timeout_s=60)
            found = {outcome.value[0] if outcome.is_ok else f"died: {outcome.exit_code}" for outcome in outcomes}
            verdict = " | ".join(sorted(found))
            counts[verdict.split(":")[0]] += 1
            lines.append(f"{seed} {in_short(verdict)}\n")
            if options.all or verdict != "equal":
                print(f"{case}\n    {verdict}", flush=True)
    finally:
        world.close()
    print(dict(counts))
    if options.record:
        (Path(__file__).parent / "verdicts.txt").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
