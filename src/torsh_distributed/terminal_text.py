"""Text that somebody else wrote, made safe to show on a terminal.

A terminal obeys control characters: an escape sequence in a file's name, an exception or a worker's output may rename
the window, hide lines, or make the terminal type an answer into the user's shell.
"""

from __future__ import annotations

import re

_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069"
"""All but tab and newline: C0 and C1 controls, and characters that turn the direction of what follows."""
_CONTROL = re.compile(f"[{_CONTROLS}]")
_COLOUR = re.compile("\x1b\\[[0-9;:]{0,64}m")
"""How programs colour their output: it changes how text looks, not where it stands."""


def neutral(text: str, *, keeps_colours: bool = False) -> str:
    """The text with every control character as people write it (`\\x1b`); tab and newline stay."""
    if _CONTROL.search(text) is None:
        return text
    if not keeps_colours:
        return _CONTROL.sub(_written, text)
    parts, at = [], 0
    for colour in _COLOUR.finditer(text):
        parts += [_CONTROL.sub(_written, text[at : colour.start()]), colour[0]]
        at = colour.end()
    return "".join(parts) + _CONTROL.sub(_written, text[at:])


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
