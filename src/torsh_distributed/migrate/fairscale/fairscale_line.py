"""`torsh run --as fairscale`: FairScale has no launcher, so all options are those of `torsh run`; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torsh_distributed.migrate.command_lines import TranslatedLine


def translate(args: Sequence[str], ours: Mapping[str, bool]) -> TranslatedLine:
    """The line as it is."""
    return TranslatedLine(args=list(args))
