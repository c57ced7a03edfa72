"""What the launcher prints itself: a line per event, and a report on a failure that leads with its cause."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.terminal import Terminal
from torsh_distributed.terminal_text import neutral

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
    """Prints the launcher's own messages on stderr; never blocks.

    With `is_json` the only thing it prints is one JSON object at the end of the job.
    """

    def __init__(self, terminal: Terminal, *, is_json: bool = False, is_raw: bool = False) -> None:
        self._terminal = terminal
        self._neutral = str if is_raw else neutral  # what ranks say about themselves is theirs
        self._is_json = is_json
        self._failures: list[dict[str, Any]] = []
        self._messages: list[str] = []

    @cached_property
    def _console(self) -> Console:
        # Imported with the first line: a job that ends well needs no rich.
        from rich.console import Console

        return Console(file=_StandardError(self._terminal), highlight=False, markup=False, soft_wrap=True)

    def say(self, message: str, *, style: str = "bold") -> None:
        """Print one line."""
        if self._is_json:
            self._messages.append(message)
            return
        from rich.text import Text

        self._console.print(Text.assemble(("torsh run: ", style), self._neutral(message)))

    def warn(self, message: str) -> None:
        """Print one line as a warning."""
        self.say(message, style="bold yellow")

    def show_wait(self, text: str, *, stack: Sequence[str], likely: str) -> None:
        """Say who waits for whom, with the late rank's stack and the likely cause."""
        self.warn("\n".join([text, *(f"  {line}" for line in stack), f"  likely cause: {likely}"]))

    def show_diagnosis(self, lines: Sequence[str]) -> None:
        """Print the doctor's report."""
        self.say("\n".join(lines))

    def show_failure(self, failure: EndReport, *, attempt: int, is_multi_node: bool, is_verbose: bool = False) -> None:
        """Print the report on why an attempt failed."""
        if self._is_json:
            self._failures.append({"attempt": attempt, **dataclasses.asdict(failure)})
            return
        from rich.text import Text

        lines = failure_lines(failure, attempt=attempt, is_multi_node=is_multi_node, is_verbose=is_verbose)
        head, *rest = map(self._neutral, lines)
        text = Text.assemble(("torsh run: ", "bold red"), (head, "bold"))
        for line in rest:
            text.append("\n" + line)
        # A terminal shows whole words on its width; a file gets every line as it is.
        self._console.print(text, soft_wrap=not self._terminal.is_tty("stderr"))

    def finish_json(self, exit_code: int, *, attempts: int) -> None:
        """Print the one object: how the job ended, why every attempt failed, and what else would be said."""
        report = {"exit_code": exit_code, "attempts": attempts, "failures": self._failures, "messages": self._messages}
        self._terminal.post("stderr", (json.dumps(report) + "\n").encode())


def failure_lines(failure: EndReport, *, attempt: int, is_multi_node: bool, is_verbose: bool = False) -> list[str]:
    """The report: the cause at the user's own line, the rank, the step; what the others did; the traceback."""
    head, *more = _headline(failure, is_multi_node=is_multi_node)
    lines = [head, *(f"  {line}" for line in more)]
    if failure.rank is not None:
        lines.append("  " + _progress_line(failure, attempt))
    lines += [f"  {line}" for line in failure.consequences]
    if failure.likely is not None:
        lines.append(f"  likely cause: {failure.likely}")
    if failure.evidence is not None:
        lines.append(f"  proof: {failure.evidence}")
    lines += [
        f"  rank {rank} had ended with exit code 0 {seconds:.1f} s before"
        for rank, seconds in failure.finished_before
        if rank != failure.rank and not failure.consequences
    ]
    if failure.raised is not None:
        lines += [f"    {line}" for line in failure.raised.traceback]
    elif failure.stack:
        lines += ["  it was at:", *(f"    {line}" for line in failure.stack)]
    if failure.last_lines and (failure.raised is None or is_verbose) and not failure.stack:
        lines.append("  last lines of its stderr:" if failure.rank is not None else "  before that:")
        lines += [f"    {line}" for line in failure.last_lines[-_SHOWN_LINES:]]
    if failure.log is not None:
        lines.append(f"  log: {failure.log}")
    return lines


def _headline(failure: EndReport, *, is_multi_node: bool) -> list[str]:
    """What happened in one line; then who, if the line does not say it."""
    where = f" on node {failure.node_rank} ({failure.node_name})" if is_multi_node else ""
    if failure.rank is None:
        return [
            failure.cause
            if not failure.node_name
            else f"node {failure.node_rank} ({failure.node_name}): {failure.cause}"
        ]
    raised = failure.raised
    ended = f"pid {failure.pid}, exit code {failure.exit_code}" if failure.pid is not None else ""
    if raised is not None and failure.cause in (raised.summary, f"exit code {failure.exit_code}"):
        place = f"{raised.where}: " if raised.where else ""
        return [f"{place}{raised.summary}", f"rank {failure.rank}{where}" + (f", {ended}" if ended else "")]
    place = f" at {failure.where}" if failure.where else ""
    return [f"rank {failure.rank}{where} failed first: {failure.cause}{place}"]


def _progress_line(failure: EndReport, attempt: int) -> str:
    parts = []
    if failure.step is not None or failure.checkpoint_step is not None:
        step = "unknown" if failure.step is None else str(failure.step)
        saved = "none" if failure.checkpoint_step is None else f"step {failure.checkpoint_step}"
        parts.append(f"last step: {step}; last checkpoint: {saved}")
    if failure.ran_s is not None:
        parts.append(f"after {failure.ran_s:.1f} s")
    if attempt or not parts:
        parts.append(f"attempt {attempt}")
    if failure.pid is not None and failure.raised is None:
        parts.append(f"pid {failure.pid}")
    return ", ".join(parts)


def join_numbers(numbers: Iterable[int]) -> str:
    """`0, 2 and 3`."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
