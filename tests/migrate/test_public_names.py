"""Every public name of DeepSpeed, Horovod and FairScale is here, refused with a sentence, or absent on its page.

`names/LIBRARY.txt` lists modules with their names, and a page of the reference says what becomes of each. A change that
loses or refuses one changes the page. A module without names in the list cannot be imported. DeepSpeed's refused names
raise when they are used, not when imported; its list ends with methods, and its page with the keys of its config.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.bed.world import ROOT
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator
from torsh_distributed.migrate.deepspeed.surface.refused_names import REFUSED, RefusedName, refused_names
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine
from torsh_distributed.migrate.stand_in import STAND_INS, install, uninstall

TITLES = {"deepspeed": "DeepSpeed", "fairscale": "FairScale", "horovod": "Horovod"}
NONE_ABSENT = ("deepspeed",)
"""Libraries of which every listed name is there, or refused with a sentence."""
OBJECTS = {"engine": DeepSpeedEngine, "accelerator": get_accelerator()}
"""What a list says of methods."""
_LISTS_MODULES = ", which has: "
"""In the error of a module that nothing else is said about."""


def listed(library: str) -> dict[str, list[str]]:
    text = (Path(__file__).with_name("names") / f"{library}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {module: names.split() for module, _, names in (line.partition(":") for line in lines)}


def imported(name: str) -> ModuleType | SimpleNamespace | str:
    """The module, or `refused` or `absent`."""
    if name in OBJECTS:
        methods = {method: True for method in listed("deepspeed")[name] if hasattr(OBJECTS[name], method)}
        return SimpleNamespace(**refused_names(name), **methods)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return "absent" if _LISTS_MODULES in str(error) else "refused"


def verdict(module: ModuleType | SimpleNamespace, name: str) -> str:
    """What becomes of `from module import name`."""
    try:
        found = getattr(module, name)
        return "absent" if found is None else "refused" if isinstance(found, RefusedName) else "present"
    except AttributeError:
        return "absent"
    except ImportError:
        return "refused"


def page(library: str) -> str:
    """The reference page; the stand-in is installed."""
    title, version = TITLES[library], importlib.import_module(STAND_INS[library]).VERSION
    lines = [
        f"# {title}'s names",
        "",
        f"What becomes of the public names of {title} {version} under `torsh run --as {library}`.",
        "A refused name raises when it is imported or used, a refused module when it is imported; the message says",
        "what to use.",
        f"[The guide](../guides/from-{library}.md) says how the others differ.",
        "",
    ]
    for name, names in listed(library).items():
        lines += [f"## {name}", "", "```text"]
        module = imported(name)
        if isinstance(module, str):
            lines.append(f"{module}: the module")
        else:
            verdicts = {one: verdict(module, one) for one in names}
            for kind in ("present", "refused", "absent"):
                found = [one for one in names if verdicts[one] == kind]
                text = f"{kind}: {' '.join(found)}"
                lines += textwrap.wrap(text, 120, subsequent_indent="    ") if found else []
        lines += ["```", ""]
    if library == "deepspeed":
        lines += ["## Config keys", "", "By value: other keys or the value decide.", "", "```text"]
        lines += [*(f"{verdict:<10} {key}" for key, verdict in keys_of(KNOWN)), "```"]
    return "\n".join(lines).rstrip() + "\n"


def keys_of(group: SettingGroup, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every config key, and its verdict in the plan; one that other keys decide is honoured or refused by them."""
    for name, setting in group.settings.items():
        if isinstance(setting, Setting):
            yield f"{prefix}{name}", "by value" if setting.verdict is None else str(setting.verdict)
        elif setting.settings:
            yield from keys_of(setting, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "by value"


def path_of(library: str) -> Path:
    return ROOT / "docs" / "reference" / f"{library}.md"


@pytest.fixture
def _installed(library: str) -> Iterator[None]:
    install(library)
    yield
    uninstall(library)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("library", TITLES)
def test_the_page_says_what_becomes_of_every_name(library: str) -> None:
    made = page(library)
    assert path_of(library).read_text() == made, f"python -m {__name__}"
    if library in NONE_ABSENT:
        assert "\nabsent: " not in made


def test_no_name_of_deepspeed_is_none() -> None:
    namespaces = importlib.import_module(STAND_INS["deepspeed"]).namespaces()
    empty = [
        f"{module}.{name}"
        for module, names in namespaces.items()
        for name, value in names.items()
        if value is None and not name.endswith("_DEFAULT")
    ]
    assert empty == []
    assert set(REFUSED) - {"engine"} <= set(namespaces)


if __name__ == "__main__":
    for one in sys.argv[1:] or TITLES:
        install(one)
        path_of(one).write_text(page(one))
