"""`python -m tests.parallel.models`: run cells of the matrix of models, print the table, write it into the guide."""

from __future__ import annotations

import argparse

from tests.bed.world import World
from tests.parallel.models.model_matrix import AXES, BEGIN, END, GUIDE, cells_of, table, verdicts
from tests.parallel.models.zoo import SPECIMENS


def main() -> None:
    """Run cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(SPECIMENS))
    parser.add_argument("--axes", nargs="*", default=list(AXES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--write", action="store_true", help="write the table into the guide")
    chosen = parser.parse_args()
    world = World()
    try:
        found: dict[int, dict[tuple[str, str], str]] = {ranks: {} for ranks in chosen.ranks}
        for ranks in chosen.ranks:
            for name in chosen.models:  # a world each: one that fails takes no other with it
                said = verdicts(world, cells_of([name], chosen.axes), ranks)
                found[ranks] |= said
                print(name, ranks, {axis: verdict.splitlines()[0] for (_, axis), verdict in said.items()}, flush=True)
    finally:
        world.close()
    page = table(found, chosen.models, chosen.axes)
    print(page)
    if chosen.write:
        text = GUIDE.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        GUIDE.write_text(f"{before}{BEGIN}\n{page}{END}{after}")


if __name__ == "__main__":
    main()
