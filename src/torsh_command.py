"""The `torsh` command, and `horovodrun`. From the first line on, Ctrl-C is one line and exit status 130.

That holds while modules are imported, too. Why not a function of the package: importing that takes 30 ms, in which a
Ctrl-C would print a traceback. This module imports only what Python itself has loaded by now. Why not a script of our
own: installers write its first line without quotes, so that it does not run where the path of the environment has a
space.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of: typeshed has no stub
import os


def end(number: int, frame: object) -> None:
    """Leave at once: nothing has been started yet. A job handles the signal itself while it runs."""
    os.write(2, b"torsh: interrupted\n")
    os._exit(128 + number)


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else ignored, by nohup for one
    _signal.signal(_signal.SIGINT, end)


def main() -> None:
    """Run `torsh` with the arguments of this process."""
    from torsh_distributed.cli.entry_point import main as run

    run()


def horovodrun() -> None:
    """Run `torsh run --as horovod` with the arguments of this process, under the name that Horovod's users type."""
    import sys

    answers = {"-v": "--version", "--version": "--version", "-cb": "env", "--check-build": "env"}
    if sys.argv[1:2] and sys.argv[1] in answers:
        sys.argv[1:] = [answers[sys.argv[1]]]
    else:
        sys.argv[1:1] = ["run", "--as", "horovod"]
    main()
