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
    is_checked: bool = False
    """Whether DeepSpeed itself refuses a key that the section does not have; elsewhere it ignores the key."""


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
    """Every wrong value, in the order of the file."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        setting = group.settings.get(name)
        if setting is None:
            continue
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


def unknown_keys(
    values: Mapping[str, Any], group: SettingGroup, prefix: str = "", *, is_checked: bool
) -> Iterator[Problem]:
    """Keys that DeepSpeed does not have, in the sections that it checks or in those that it does not."""
    for name, value in values.items():
        setting = group.settings.get(name)
        if setting is None and not group.is_open and group.is_checked == is_checked:
            yield unknown_key(f"{prefix}{name}", group.settings, kind="DeepSpeed")
        elif isinstance(setting, SettingGroup) and isinstance(value, Mapping):
            yield from unknown_keys(value, setting, f"{prefix}{name}.", is_checked=is_checked)


_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1"), ("false", "f", "no", "n", "off", "0")


def put_plain_values(values: dict[str, Any], group: SettingGroup) -> None:
    """Write values as they are meant: DeepSpeed takes 1 for true, and in checked sections text for numbers."""
    for name, value in values.items():
        setting = group.settings.get(name)
        if isinstance(setting, SettingGroup) and isinstance(value, dict):
            put_plain_values(value, setting)
        elif isinstance(setting, Setting):
            values[name] = _plain_value(setting, value, takes_text=group.is_checked)


def _plain_value(setting: Setting, value: Any, *, takes_text: bool) -> Any:
    if setting.kind == "flag":
        if isinstance(value, int | float) and value in (0, 1):
            return bool(value)
        if takes_text and isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
    if takes_text and setting.kind in ("whole", "number") and isinstance(value, str):
        try:
            return int(value) if setting.kind == "whole" else float(value)
        except ValueError:
            return value
    return value


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
