"""What a key of a DeepSpeed config may be, its default, and its verdict where that never depends on other keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torsh_distributed.migrate.report import Verdict, unknown_key
from torsh_distributed.plan.problems import Problem, did_you_mean

AUTO = "auto"
"""What stands in a file for a value that a trainer fills in."""

_IN_WORDS = {
    "flag": "true or false",
    "whole": "a whole number",
    "number": "a number",
    "text": "text",
    "words": "a list of text",
    "any": "anything",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key: the values it takes, and what becomes of it."""

    kind: Literal["flag", "whole", "number", "text", "words", "any"]
    default: Any = None
    choices: tuple[Any, ...] = ()
    """The values it takes, where they are few."""
    least: float | None = None
    verdict: Verdict | None = None
    """None: a translator decides, since other keys or the value matter."""
    means: str = ""
    reason: str = ""
    is_own_auto: bool = False
    """Whether "auto" is a value of DeepSpeed's own here, not one for a trainer to fill."""

    def hint(self, reason: str, means: str = "") -> Setting:
        """It tunes what works in another way here."""
        return replace(self, verdict=Verdict.HINT, means=means, reason=reason)

    def honoured(self, means: str, reason: str = "") -> Setting:
        """It is done here, without a key."""
        return replace(self, verdict=Verdict.HONOURED, means=means, reason=reason)

    def equivalent(self, means: str, reason: str = "") -> Setting:
        """It is done here by other means."""
        return replace(self, verdict=Verdict.EQUIVALENT, means=means, reason=reason)

    def refused(self, reason: str) -> Setting:
        """It is not done here, unless it asks for nothing."""
        return replace(self, verdict=Verdict.REFUSED, reason=reason)

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the value is the default, or turns off what the key is about."""
        return value == self.default or value in (None, False, 0, "none", [], {})

    def problem(self, key: str, value: Any) -> Problem | None:
        """What is wrong with a value, if anything. None is a value of every key: it stands for the default."""
        if value is None or (value == AUTO and self.is_own_auto):
            return None
        if not _fits(self.kind, value):
            hint = "" if value != AUTO else "a trainer fills it; see fills"
            return Problem(key, f"{key} must be {self._words}; got {value!r}", hint)
        if self.choices and _plain(value) not in self.choices:
            return Problem(
                key,
                f"{key} must be {self._words}; got {value!r}",
                did_you_mean(str(value), [str(one) for one in self.choices]),
            )
        if self.least is not None and value < self.least:
            return Problem(key, f"{key} must be at least {self.least:g}; got {value!r}")
        return None

    @property
    def _words(self) -> str:
        return f"one of {', '.join(map(str, self.choices))}" if self.choices else _IN_WORDS[self.kind]


@dataclass(frozen=True, kw_only=True)
class SettingGroup:
    """A section: its keys by name. `gate` is the flag that turns it on; while it is off, its keys ask for nothing."""

    settings: Mapping[str, Setting | SettingGroup]
    gate: str | None = None
    is_open: bool = False
    """Whether keys of any name may stand in it: they are arguments of what it names."""


def flag(default: bool | None = False) -> Setting:
    """True or false."""
    return Setting(kind="flag", default=default)


def whole(default: int | None = None, *, least: int | None = 0, choices: tuple[int, ...] = ()) -> Setting:
    """A whole number; `5e8` is one."""
    return Setting(kind="whole", default=default, least=least, choices=choices)


def number(default: float | None = None, *, least: float | None = None) -> Setting:
    """A number."""
    return Setting(kind="number", default=default, least=least)


def text(default: str | None = None, *choices: str) -> Setting:
    """Text, or one of `choices` in any case."""
    return Setting(kind="text", default=default, choices=choices)


def words(*default: str) -> Setting:
    """A list of text."""
    return Setting(kind="words", default=list(default))


def anything(default: Any = None) -> Setting:
    """What DeepSpeed itself does not look into."""
    return Setting(kind="any", default=default)


def problems_in(values: Mapping[str, Any], group: SettingGroup, prefix: str = "") -> Iterator[Problem]:
    """Every unknown key and wrong value, in the order of the file."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in group.settings:
            if not group.is_open:
                yield unknown_key(key, group.settings, kind="DeepSpeed")
            continue
        setting = group.settings[name]
        if isinstance(setting, Setting):
            found = setting.problem(key, value)
            if found is not None:
                yield found
        elif isinstance(value, Mapping):
            yield from problems_in(value, setting, f"{key}.")
        elif value is not None:
            yield Problem(
                key, f"{key} must be a section of keys; got {value!r}", f"it has: {', '.join(setting.settings)}"
            )


def leaves_of(values: Mapping[str, Any], group: SettingGroup, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key that the config gives, in full, with its value; an empty section is a key too."""
    for name, value in values.items():
        setting = group.settings.get(name)
        if isinstance(setting, SettingGroup) and isinstance(value, Mapping) and value:
            yield from leaves_of(value, setting, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting_at(key: str, group: SettingGroup) -> Setting | SettingGroup | None:
    """The setting of a key in full; None for one inside an open section."""
    found: Setting | SettingGroup | None = group
    for name in key.split("."):
        found = found.settings.get(name) if isinstance(found, SettingGroup) else None
    return found


def _plain(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _fits(kind: str, value: Any) -> bool:
    if kind == "any":
        return True
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str)
    if kind == "words":
        return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value == value and (kind == "number" or float(value).is_integer())
