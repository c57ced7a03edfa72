"""`python -m tests.parallel.models`: run cells of the matrix of models, print the table, write it into the guide."""

from __future__ import annotations

import argparse

from tests.bed.world import World
from tests.parallel.models.model_matrix import AXES, BEGIN, END, GUIDE, table, verdicts
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
        found = {ranks: verdicts(world, chosen.models, chosen.axes, ranks) for ranks in chosen.ranks}
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
