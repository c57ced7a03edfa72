"""A config on its way into a plan: what is set so far, and the verdict on each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_distributed.errors import InternalError
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup, leaves_of, setting_at
from torsh_distributed.migrate.report import KeyVerdict, Verdict
from torsh_distributed.plan.describing import show
from torsh_distributed.plan.problems import Problem, did_you_mean

NOT_GIVEN = "not given"
"""What the table shows for a key that the file leaves to DeepSpeed's default."""


class Translation:
    """The values of one config; translators read them, set keys of the plan and give verdicts."""

    def __init__(self, values: Mapping[str, Any], *, world_size: int | None, version: tuple[int, ...]) -> None:
        self.values = values
        self.world_size = world_size
        self.version = version
        """DeepSpeed's version, whose defaults hold for keys that are not given."""
        self.sections: dict[str, dict[str, Any]] = {}
        """The plan so far."""
        self.problems: list[Problem] = []
        self._given = dict(leaves_of(values, KNOWN))
        self._verdicts: dict[str, KeyVerdict] = {}

    # --- what the config says ------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether the config gives the key, or keys under it, and does not leave it null."""
        return self._at(key) is not None

    def get(self, key: str) -> Any:
        """The value of a key in full: as given, or DeepSpeed's default."""
        found = self._at(key)
        if found is not None:
            return found
        setting = setting_at(key, KNOWN)
        return setting.default if isinstance(setting, Setting) else None

    def is_on(self, section: str) -> bool:
        """Whether a section with a gate, and every section around it, is turned on."""
        parts = section.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            group = setting_at(name, KNOWN)
            if isinstance(group, SettingGroup) and group.gate is not None and not self.get(f"{name}.{group.gate}"):
                return False
        return True

    def _at(self, key: str) -> Any:
        found: Any = self.values
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    # --- what becomes of it --------------------------------------------------------------------------------------

    def set(self, plan_key: str, value: Any) -> str:
        """Set a key of the plan; returns it in words, for the table."""
        section, _, name = plan_key.partition(".")
        self.sections.setdefault(section, {})[name] = value
        return f"{plan_key} = {show(value)}"

    def give(self, key: str, verdict: Verdict, means: str = "", reason: str = "") -> None:
        """The verdict on a key that the config gives; nothing for one it does not give."""
        if key in self._given:
            self._verdicts[key] = KeyVerdict(key, self._given[key], verdict, means, reason)

    def give_default(self, key: str, value: Any, verdict: Verdict, means: str, reason: str) -> None:
        """A line for a key that the config does not give, where DeepSpeed's default does something."""
        self._verdicts[key] = KeyVerdict(f"{key} ({NOT_GIVEN})", value, verdict, means, reason)

    def honoured(self, key: str, means: str = "", reason: str = "") -> None:
        """The key has the same meaning here."""
        self.give(key, Verdict.HONOURED, means, reason)

    def equivalent(self, key: str, means: str = "", reason: str = "") -> None:
        """The result is the same by other means."""
        self.give(key, Verdict.EQUIVALENT, means, reason)

    def hint(self, key: str, reason: str, means: str = "") -> None:
        """The key tunes what works in another way here."""
        self.give(key, Verdict.HINT, means, reason)

    def refuse(self, key: str, reason: str) -> None:
        """What the key asks for is not done here."""
        self.give(key, Verdict.REFUSED, "", reason)

    def wrong(self, key: str, text: str, hint: str = "") -> None:
        """The config contradicts itself, or cannot be meant."""
        self.problems.append(Problem(key, text, hint))

    def entries(self) -> tuple[KeyVerdict, ...]:
        """One verdict for every key of the config, in its order; those of defaults follow."""
        for key, value in self._given.items():
            if key not in self._verdicts:
                self._verdicts[key] = self._fixed_verdict(key, value)
        order = [*self._given, *(key for key in self._verdicts if key not in self._given)]
        return tuple(self._verdicts[key] for key in order)

    def _fixed_verdict(self, key: str, value: Any) -> KeyVerdict:
        section = key.rpartition(".")[0]
        if section and not self.is_on(section):
            return KeyVerdict(key, value, Verdict.HONOURED, "", "off: it has no effect in DeepSpeed either")
        setting = setting_at(key, KNOWN)
        if value is None:
            return KeyVerdict(key, value, Verdict.HONOURED, "", "null: DeepSpeed's default holds")
        if isinstance(setting, SettingGroup):
            return KeyVerdict(key, value, Verdict.HONOURED, "", "an empty section asks for nothing")
        if setting is None:
            around = setting_at(section, KNOWN) if section else KNOWN
            if isinstance(around, SettingGroup) and not around.is_open:
                near = did_you_mean(key.rpartition(".")[2], around.settings)
                reason = "DeepSpeed has no such key, and ignores it" + (f": {near}" if near else "")
                return KeyVerdict(key, value, Verdict.HINT, "", reason)
            # Inside an open section that is on, whose translator speaks for what it reads.
            return KeyVerdict(key, value, Verdict.HINT, "", f"it belongs to {section}")
        if setting.verdict is None and not setting.asks_for_nothing(value):
            raise InternalError(f"no verdict for {key}", hint="please report it with the config")
        is_off = value is False and not setting.default
        if (
            is_off
            or setting.verdict is None
            or (setting.verdict is Verdict.REFUSED and setting.asks_for_nothing(value))
        ):
            return KeyVerdict(key, value, Verdict.HONOURED, "", "it asks for nothing")
        return KeyVerdict(key, value, setting.verdict, setting.means, setting.reason)
