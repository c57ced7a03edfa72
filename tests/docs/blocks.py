"""The code blocks of a page, and how the tests read them.

- A `python` block runs, unless an HTML comment right above it says `<!-- no-run: reason -->`.
- `<!-- continues -->` above it runs it after the python block before, in the same process.
- Blocks of a page share a folder, in order. A block with `title="name"` is first written there as a file.
- Lines of `bash` and `console` blocks that start with `torsh` must be commands that exist, with options that exist.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>```+)(?P<language>\w*)(?P<info>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_COMMENT = re.compile(r"^\s*<!--\s*(?P<word>no-run|continues)\s*(?::\s*(?P<reason>.*?))?\s*-->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block and what stands right above it."""

    page: Path
    line: int
    language: str
    title: str
    mark: str
    """no-run, continues, or nothing."""
    reason: str
    source: str

    @property
    def place(self) -> str:
        """Page and line, as an editor takes it."""
        return f"{self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page whose code is held to work."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text().splitlines()
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index])
        if opening is None:
            index += 1
            continue
        start, closing = index, f"{opening['indent']}{opening['fence']}"
        index += 1
        while index < len(lines) and lines[index].rstrip() != closing:
            index += 1
        if index == len(lines):
            raise ValueError(f"{page}:{start + 1}: the block is never closed")
        body = [line.removeprefix(opening["indent"]) for line in lines[start + 1 : index]]
        above = next((line for line in reversed(lines[:start]) if line.strip()), "")
        comment = _COMMENT.match(above)
        title = _TITLE.search(opening["info"])
        yield Block(
            page=page,
            line=start + 1,
            language=opening["language"],
            title=title[1] if title else "",
            mark=comment["word"] if comment else "",
            reason=(comment["reason"] or "") if comment else "",
            source="\n".join(body) + "\n",
        )
        index += 1


def programs(blocks: list[Block]) -> list[list[Block]]:
    """Python blocks to run, each with those that continue it."""
    found: list[list[Block]] = []
    for block in blocks:
        if block.language != "python" or block.mark == "no-run":
            continue
        if block.mark == "continues":
            if not found:
                raise ValueError(f"{block.place}: there is no block to continue")
            found[-1].append(block)
        else:
            found.append([block])
    return found


def torsh_commands(block: Block) -> Iterator[list[str]]:
    """The arguments of every `torsh …` in a shell block; lines with an ellipsis are sketches, not commands."""
    text = block.source.replace("\\\n", " ")
    for line in (each.strip().removeprefix("$ ") for each in text.splitlines()):
        if "…" in line or "..." in line:
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("|&;<>"):
                while words and "=" in words[0]:
                    words.pop(0)  # VARIABLE=value before the command
                if words and words[0] == "torsh":
                    yield words[1:]
                words = []
            else:
                words.append(token)
