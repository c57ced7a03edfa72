"""What the installed command, `torsh_command`, calls: the command line, without garbage collection, quiet at Ctrl-C.

Why no collection: importing a command makes tens of thousands of objects that all stay, and looking through them for
garbage takes a tenth of the time of `torsh plan validate`. The collector is on again before a command runs.
"""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType


def main() -> None:
    """Run `torsh` with the arguments of this process."""
    end_quietly_at_interrupt()
    gc.disable()
    from torsh_distributed.cli.app import main as run

    run()


def end_quietly_at_interrupt() -> None:
    """Until something is started that has to be ended, Ctrl-C is one line and exit status 130, not a traceback.

    A job handles it itself while it runs. A signal that is ignored (nohup) stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"torsh: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
