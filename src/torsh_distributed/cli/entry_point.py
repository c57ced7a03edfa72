"""What the `torsh` script calls: the command line, imported without garbage collection.

Why: importing a command makes tens of thousands of objects that all stay, and looking through them for garbage takes a
tenth of the time of `torsh plan validate`. The collector is on again before a command runs.
"""

from __future__ import annotations

import gc


def main() -> None:
    """Run `torsh` with the arguments of this process."""
    gc.disable()
    from torsh_distributed.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
