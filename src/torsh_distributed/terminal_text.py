"""Text that somebody else wrote, made safe to show on a terminal.

A terminal obeys control characters: an escape sequence in a file's name, an exception or a worker's output may rename
the window, hide lines, or make the terminal type an answer into the user's shell.
"""

from __future__ import annotations

import re

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\udc80-\udc9f"
"""All but tab and newline: C0 and C1 controls, and characters that turn the direction of what follows."""
_CONTROL = re.compile(f"[{_CONTROLS}]")
_SEQUENCE = re.compile("\x1b\\[[0-9;:]{0,64}([A-HJKSTfm])")
"""How programs colour their output (m), and how progress bars move about, which means nothing after a rank's name."""
_MAYBE = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f-\xff]")


def neutral(text: str) -> str:
    """The text with every control character as people write it (`\\x1b`); tab and newline stay."""
    return text if _CONTROL.search(text) is None else _CONTROL.sub(_written, text)


def neutral_output(line: bytes) -> bytes:
    """A line of a program's output: its colours stay, movements of the cursor go, and the rest is written out."""
    if _MAYBE.search(line) is None:
        return line
    text = line.decode(errors="surrogateescape")
    if _CONTROL.search(text) is None:
        return line
    parts, at = [], 0
    for sequence in _SEQUENCE.finditer(text):
        parts += [neutral(text[at : sequence.start()]), sequence[0] if sequence[1] == "m" else ""]
        at = sequence.end()
    return ("".join(parts) + neutral(text[at:])).encode(errors="surrogateescape")


def shown(line: str) -> str:
    """`neutral_output` of a line that is text already."""
    return neutral_output(line.encode(errors="surrogateescape")).decode(errors="surrogateescape")


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDC9F:  # a byte that is not UTF-8: a control character to some terminals
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
