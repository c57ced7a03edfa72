"""What others wrote cannot steer the terminal it is shown on."""

from __future__ import annotations

import pytest

from torsh_distributed.terminal_text import neutral, neutral_output


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain, é 漢 ✓\n\tindented", "plain, é 漢 ✓\n\tindented"),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x08c\x9b2J", "a\\x0db\\x08c\\x9b2J"),
        ("file\u202etxt.exe", "file\\u202etxt.exe"),
    ],
)
def test_control_characters_are_written_out(given: str, shown: str) -> None:
    assert neutral(given) == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"loss 1.0", b"loss 1.0"),
        ("é 漢".encode(), "é 漢".encode()),
        (b"\xff\xfe not text", b"\xff\xfe not text"),
        (b"\x1b[1;31mred\x1b[0m", b"\x1b[1;31mred\x1b[0m"),
        (b"bar\x1b[A\x1b[2Kagain", b"baragain"),
        (b"\x1b]52;c;cm0gLXJmCg==\x07", b"\\x1b]52;c;cm0gLXJmCg==\\x07"),
        (b"\x1b[6n\x1bP$qm\x1b\\", b"\\x1b[6n\\x1bP$qm\\x1b\\"),
        (b"\x9b31m", b"\\x9b31m"),
        ("\x9b31m".encode(), b"\\x9b31m"),
    ],
)
def test_output_keeps_its_colours_alone(given: bytes, shown: bytes) -> None:
    assert neutral_output(given) == shown
