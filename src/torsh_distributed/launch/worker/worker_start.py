"""The first steps of a worker: open its line to the launcher, then run the script or module as Python itself would.

Run by path, before this package is imported, so it imports only the standard library: a script that knows nothing of
this library must find everything as under plain Python. What ends the script is told to the launcher when it is raised.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import types
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is slow to import
_PACKAGE = "torsh_distributed.launch.worker"
STACK_SIGNAL = signal.SIGRTMAX - 2
"""Makes a worker that does not answer write its stacks; a signal that neither libc nor batch systems use."""


def main() -> None:
    """`worker_start.py script.py ARGS` or `worker_start.py -m module ARGS`."""
    line = _load("raised_error", "torch_flight_recorder", "waiting_operations", "launcher_line")
    line.open_line()
    line.watch_threads()
    _keep_fatal_stacks()
    if "torch" in sys.modules:  # in a worker that was forked from the spare
        _record_as_asked()
    else:
        sys.meta_path.insert(0, _TorchFinder())
    try:
        if sys.argv[1] == "-m":
            _run_module(sys.argv[2], sys.argv[3:])
        else:
            _run_script(sys.argv[1], sys.argv[2:])
    except BaseException as error:
        line.leave(error)
        raise
    line.leave(SystemExit(0))


def _record_as_asked() -> None:
    """What `sitecustomize` does when torch is imported, for a worker in which that was before its environment."""
    from torsh_distributed.launch.worker.recording.event_recording import record_as_asked

    record_as_asked()


def _load(*names: str) -> Any:
    """Import modules of this folder by path, under their full names, without their packages; returns the last.

    A later import of this package finds them loaded.
    """
    for name in names:
        full_name = f"{_PACKAGE}.{name}"
        if full_name in sys.modules:  # in a worker that was forked from the spare
            module = sys.modules[full_name]
            continue
        spec = importlib.util.spec_from_file_location(full_name, os.path.join(_FOLDER, f"{name}.py"))  # noqa: PTH118
        assert spec is not None, "a Python file has a spec"
        assert spec.loader is not None, "a Python file has a loader"
        module = sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _keep_fatal_stacks() -> None:
    """Let a segmentation fault leave the Python stack in a file for the launcher, unless the user keeps it himself."""
    import faulthandler

    path = os.environ.get("TORSH_PROGRESS_FILE")
    if not path or faulthandler.is_enabled():
        return
    try:
        # Never closed: the first is written when the process dies, the second when the launcher asks in vain.
        fatal = os.open(f"{path}.stack", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        asked = os.open(f"{path}.threads", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    faulthandler.enable(fatal)
    # Ignored once Python has taken its handlers away at the end: the launcher may ask at that moment too.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    # Runs in the signal handler, so it works while native code holds Python's lock.
    faulthandler.register(STACK_SIGNAL, asked, all_threads=True)


class _TorchFinder:
    """Keeps a Ctrl-C during `import torch` for the next module that it imports, or for its end.

    Why: torch's native code runs Python and does not expect an interrupt there. Where it imports numpy it clears
    whatever that raises and goes on without numpy: the worker would train on, until the launcher kills it. Where it
    describes its enumerations, the process aborts with all of its stack on the terminal. So the handler raises nothing;
    between two modules an interrupt does no harm, and one that was cleared is raised again at the next.
    """

    def __init__(self) -> None:
        self._is_interrupted = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Asked for every module that is imported, until torch is."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        if name != "torch":
            return None
        # The other finders: some of them wait for torch too.
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path) if finder is not self)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._watch(execute, module)  # type: ignore[method-assign]
        return spec

    def _watch(self, execute: Any, module: types.ModuleType) -> None:
        # Only the main thread may set a handler, and only there KeyboardInterrupt is raised.
        is_watched = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if is_watched:
            signal.signal(signal.SIGINT, self._note)
        try:
            execute(module)
        finally:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            if is_watched:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_interrupted:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._is_interrupted = True


def _run_script(path: str, args: list[str]) -> None:
    sys.argv = [path, *args]
    if os.path.isdir(path):  # noqa: PTH112
        _run_main_of_folder(path)
        return
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    loader: Any
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = loader.source_to_code(loader.get_data(path), path)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - the user's own script


def _run_main_of_folder(path: str) -> None:
    import runpy

    if sys.flags.safe_path:
        sys.path.insert(0, path)
    else:
        sys.path[0] = path
    sys.modules["__main__"] = types.ModuleType("__main__")
    runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # what `python FOLDER` calls


def _run_module(name: str, args: list[str]) -> None:
    import runpy

    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # noqa: PTH109
    sys.argv = ["-m", *args]
    sys.modules["__main__"] = types.ModuleType("__main__")
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls


if __name__ == "__main__":
    main()
