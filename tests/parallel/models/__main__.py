"""`python -m tests.parallel.models`: run cells of the matrix of models, print the table, write it into the guide.

With `--keep` the verdicts go into the record, of which `--write` makes the table of the guide: the matrix can be run in
pieces, a few models or axes at a time.
"""

from __future__ import annotations

import argparse

from tests.bed.world import World
from tests.parallel.models.model_matrix import AXES, BEGIN, END, GUIDE, cells_of, page_of, table, verdicts
from tests.parallel.models.verdict_record import keep, read_record, source_commit
from tests.parallel.models.zoo import SPECIMENS


def main() -> None:
    """Run cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(SPECIMENS))
    parser.add_argument("--axes", nargs="*", default=list(AXES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--keep", action="store_true", help="add the verdicts to the record")
    parser.add_argument("--write", action="store_true", help="write the table of the whole record into the guide")
    chosen = parser.parse_args()
    if chosen.keep:
        source_commit()  # refuse before the run
    world = World()
    try:
        found: dict[int, dict[tuple[str, str], str]] = {ranks: {} for ranks in chosen.ranks}
        for name in chosen.models:
            for ranks in chosen.ranks:  # a world each: one that fails takes no other with it
                said = verdicts(world, cells_of([name], chosen.axes), ranks)
                found[ranks] |= said
                print(name, ranks, {axis: verdict.splitlines()[0] for (_, axis), verdict in said.items()}, flush=True)
                if chosen.keep:
                    keep({ranks: said})
    finally:
        world.close()
    print(table(found, chosen.models, chosen.axes))
    if chosen.write:
        text = GUIDE.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        GUIDE.write_text(f"{before}{BEGIN}\n{page_of(read_record())}{END}{after}")


if __name__ == "__main__":
    main()
