"""What the launcher prints itself: a line per event, and a paragraph about a failure."""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from typing_extensions import override

from torsh_distributed.launch.local.job_failure import JobFailure
from torsh_distributed.launch.local.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_LINES = 12


class _StandardError(io.StringIO):
    """A file for rich that passes each print to the terminal in one piece."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self._terminal = terminal

    @override
    def flush(self) -> None:
        self._terminal.post("stderr", self.getvalue().encode(errors="replace"))
        self.seek(0)
        self.truncate()

    @override
    def isatty(self) -> bool:
        return self._terminal.is_tty("stderr")


class LauncherOutput:
    """Prints the launcher's own messages on stderr; never blocks."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    @cached_property
    def _console(self) -> Console:
        # Imported with the first line: a job that ends well needs no rich.
        from rich.console import Console

        return Console(file=_StandardError(self._terminal), highlight=False, markup=False, soft_wrap=True)

    def say(self, message: str, *, style: str = "bold") -> None:
        """Print one line."""
        from rich.text import Text

        self._console.print(Text.assemble(("torsh run: ", style), message))

    def warn(self, message: str) -> None:
        """Print one line as a warning."""
        self.say(message, style="bold yellow")

    def show_failure(self, failure: JobFailure, *, attempt: int, is_multi_node: bool) -> None:
        """Print the paragraph about the first failure of an attempt."""
        from rich.text import Text

        head, *rest = failure_lines(failure, attempt=attempt, is_multi_node=is_multi_node)
        text = Text.assemble(("torsh run: ", "bold red"), (head, "bold"))
        for line in rest:
            text.append("\n" + line)
        self._console.print(text)


def failure_lines(failure: JobFailure, *, attempt: int, is_multi_node: bool) -> list[str]:
    """The report: who failed first and how, then the facts that help, one per line."""
    where = f" on node {failure.node_rank} ({failure.node_name})" if is_multi_node else ""
    if failure.rank is None and not failure.node_name:
        head = failure.cause
    elif failure.rank is None:
        head = f"node {failure.node_rank} ({failure.node_name}): {failure.cause}"
    else:
        head = f"rank {failure.rank}{where} failed first: {failure.cause}"
    lines = [head]
    facts = dict(_facts(failure, attempt))
    width = max(map(len, facts), default=0)
    lines += [f"  {name + ':':<{width + 1}} {value}" for name, value in facts.items()]
    if failure.last_lines:
        lines.append("  last lines of its stderr:" if failure.rank is not None else "  before that:")
        lines += [f"    | {line}" for line in failure.last_lines[-_SHOWN_LINES:]]
    return lines


def _facts(failure: JobFailure, attempt: int) -> Iterable[tuple[str, str]]:
    if failure.evidence is not None:
        yield "proof", failure.evidence
    if failure.pid is not None:
        ran = f", ran {failure.ran_s:.1f} s" if failure.ran_s is not None else ""
        yield "process", f"pid {failure.pid}, attempt {attempt}{ran}"
    if failure.step is not None or failure.checkpoint_step is not None:
        step = "unknown" if failure.step is None else str(failure.step)
        saved = "none" if failure.checkpoint_step is None else f"step {failure.checkpoint_step}"
        yield "last step", f"{step}; last checkpoint: {saved}"
    for rank, seconds in failure.finished_before:
        yield f"rank {rank}", f"had ended with exit code 0 {seconds:.1f} s before, while others went on"
    if failure.log is not None:
        yield "log", failure.log


def join_numbers(numbers: Iterable[int]) -> str:
    """`0, 2 and 3`."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
