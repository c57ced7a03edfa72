"""An engine's own settings, given as `--set key=value`: unknown ones are refused, with the nearest that exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from torsh_distributed.errors import InvalidArgument


def require_known_options(engine: str, options: Mapping[str, str], known: Mapping[str, str]) -> None:
    """Raise InvalidArgument if `options` has a key that `known` (name to meaning) has not."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise InvalidArgument(
                f"the engine {engine!r} has no setting {name!r}",
                hint=f"did you mean {near[0]!r}?" if near else _listed(known),
                setting=name,
            )


def _listed(known: Mapping[str, str]) -> str:
    if not known:
        return "it has no settings of its own"
    return "settings: " + "; ".join(f"{name} ({meaning})" for name, meaning in known.items())


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """The settings of `key=value` words; a key given twice is an error."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        name = name.strip()
        if not separator or not name:
            raise InvalidArgument("a setting must read key=value", hint="for example --set partition=gpu", got=pair)
        if name in found:
            raise InvalidArgument(f"the setting {name!r} is given twice", hint="give it once", setting=name)
        found[name] = value
    return found


def is_set(options: Mapping[str, str], name: str) -> bool:
    """Whether a setting that is on or off is on; off if it is not given."""
    value = options.get(name, "no")
    if value not in ("yes", "1", "no", "0", ""):
        raise InvalidArgument(f"the setting {name!r} must be yes or no", got=value)
    return value in ("yes", "1")
