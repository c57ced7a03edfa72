"""What other processes may call here, by name: `expose` lists functions and classes, `sendable` dataclasses.

A name that arrives is looked up in this table and nowhere else, so a caller chooses among what was listed and
cannot bring code along.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torsh_distributed.errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExposeOptions:
    """How calls of one function run."""

    inline: bool = False
    most_at_once: int | None = None


class Exposed:
    """One callable of this process, and the calls of it that wait for their turn."""

    def __init__(self, name: str, function: Callable[..., Any], options: ExposeOptions) -> None:
        self.name = name
        self.function = function
        self.is_inline = options.inline
        self._most_at_once = options.most_at_once
        self._num_running = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()

    def begin(self, start: Callable[[], None]) -> None:
        """Call `start` now, or when as many calls have ended as are too many."""
        if self._most_at_once is not None:
            with self._lock:
                if self._num_running >= self._most_at_once:
                    self._waiting.append(start)
                    return
                self._num_running += 1
        start()

    def end(self) -> None:
        """A call that had begun has ended; the next one starts."""
        if self._most_at_once is None:
            return
        with self._lock:
            if not self._waiting:
                self._num_running -= 1
                return
            start = self._waiting.popleft()
        start()


class ExposedTable:
    """Everything that this process exposes. Any thread."""

    def __init__(self) -> None:
        self._by_name: dict[str, Exposed] = {}
        self._names: dict[Any, str] = {}
        self._classes: dict[type, Exposed] = {}
        self._value_classes: dict[str, type] = {}
        self._value_names: dict[type, str] = {}
        self._open_modules: set[str] = set()

    def add(self, target: Callable[..., Any], name: str | None, options: ExposeOptions) -> None:
        """List a function, or a class with its public methods. A name means one thing: a second one raises."""
        if not callable(target):
            raise InvalidArgument("only functions and classes can be exposed", type=type(target).__name__)
        if options.most_at_once is not None and options.most_at_once < 1:
            raise InvalidArgument("most_at_once is 1 or more", most_at_once=options.most_at_once)
        name = name or full_name(target)
        self._put(name, target, options)
        if inspect.isclass(target):
            self._classes[target] = self._by_name[name]
            for method_name, method in inspect.getmembers(target, callable):
                if not method_name.startswith("_"):
                    self._put(f"{name}.{method_name}", method, options)

    def _put(self, name: str, function: Callable[..., Any], options: ExposeOptions) -> None:
        there = self._by_name.get(name)
        # The same line run again, as in a notebook or a reloaded module, replaces it.
        if there is not None and full_name(there.function) != full_name(function):
            raise InvalidArgument(
                "this name is exposed already, for something else",
                hint="give one of them another name: @expose(name=...)",
                name=name,
                there=full_name(there.function),
            )
        self._by_name[name] = Exposed(name, function, options)
        self._names[function] = name

    def add_value(self, kind: type) -> None:
        """List a dataclass whose instances may travel."""
        if not dataclasses.is_dataclass(kind):
            raise InvalidArgument("only dataclasses can be sent", hint="put @dataclass below", type=kind.__name__)
        self._value_names[kind] = full_name(kind)
        self._value_classes[full_name(kind)] = kind

    def open_module(self, module: str) -> None:
        """Expose every function and class that is defined in this module."""
        self._open_modules.add(module)

    def find(self, name: str) -> Exposed | None:
        """What is exposed under this name."""
        found = self._by_name.get(name)
        if found is None and self._open_modules:
            self._look_in_open_modules(name)
            found = self._by_name.get(name)
        return found

    def _look_in_open_modules(self, name: str) -> None:
        module_name, _, path = name.partition(":")
        top = path.partition(".")[0]
        if module_name not in self._open_modules or not top or (top.startswith("_") and "." in path):
            return
        for module in (module_name, "__mp_main__") if module_name == "__main__" else (module_name,):
            target = getattr(sys.modules.get(module), top, None)
            if callable(target) and full_name(target) == f"{module_name}:{top}":
                self.add(target, None, ExposeOptions())
                return

    def unknown(self, name: str) -> str:
        """What to say about a name that is not exposed."""
        nearest = difflib.get_close_matches(name, self._by_name, n=1)
        return f"did you mean {nearest[0]}?" if nearest else "put @rpc.expose above it, and import it there"

    def name_of(self, function: Callable[..., Any]) -> str:
        """The name of a function or class: as it was exposed here, or as it would be there."""
        return self.name_of_function(function) or full_name(function)

    def method_of(self, value: Any, method: str) -> Exposed | None:
        """A public method of an object whose class, or a base of it, is exposed."""
        for kind in type(value).__mro__:
            exposed = self._classes.get(kind)
            if exposed is None and self._open_modules:
                self.find(full_name(kind))
                exposed = self._classes.get(kind)
            if exposed is not None:
                return self._by_name.get(f"{exposed.name}.{method}")
        return None

    # What encoding and decoding ask

    def name_of_value(self, kind: type) -> str | None:
        """The name of a dataclass that may travel."""
        return self._value_names.get(kind)

    def value_class(self, name: str) -> type | None:
        """The dataclass of that name."""
        return self._value_classes.get(name)

    def name_of_function(self, function: Callable[..., Any]) -> str | None:
        """The name of an exposed function; None if it is not exposed."""
        try:
            found = self._names.get(function)
        except TypeError:  # it has no hash
            return None
        if found is None and self._open_modules and hasattr(function, "__qualname__"):
            exposed = self.find(full_name(function))
            return None if exposed is None else exposed.name
        return found

    def function(self, name: str) -> Callable[..., Any] | None:
        """The exposed function of that name."""
        exposed = self.find(name)
        return None if exposed is None else exposed.function


def full_name(target: Any) -> str:
    """`module:qualname`. The script itself is `__main__` in every process that runs it."""
    module = getattr(target, "__module__", None) or "builtins"
    qualname = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{'__main__' if module == '__mp_main__' else module}:{qualname}"


TABLE = ExposedTable()
"""Of this process: decorators run when modules are imported, before any worker is started."""


@overload
def expose(target: F) -> F: ...
@overload
def expose(*, name: str | None = None, inline: bool = False, most_at_once: int | None = None) -> Callable[[F], F]: ...
def expose(
    target: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    inline: bool = False,
    most_at_once: int | None = None,
) -> Any:
    """Let other processes of the job call this function, or make this class and call its public methods.

    Its name is `module:qualname`, unless `name` gives another. `inline` is for functions that take microseconds and
    wait for nothing: they run on the thread that reads the socket, which saves a change of threads and holds up all
    other callers meanwhile. `most_at_once` limits how many calls run at the same time (for a class: of each of its
    methods); the others wait for their turn.
    """
    options = ExposeOptions(inline=inline, most_at_once=most_at_once)

    def add(found: F) -> F:
        TABLE.add(found, name, options)
        return found

    return add if target is None else add(target)


def sendable(kind: C) -> C:
    """Let instances of this dataclass travel as arguments and results; both sides register it."""
    TABLE.add_value(kind)
    return kind
