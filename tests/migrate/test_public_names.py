"""Every public name of DeepSpeed, Horovod and FairScale is here, refused with a sentence, or absent on its page.

`names/LIBRARY.txt` lists modules with their names, calls with the arguments that scripts give by name. A page of the
reference says what becomes of each. A change that loses or refuses one changes the page. A module without names in the
list cannot be imported. DeepSpeed's refused names raise when they are used, not when imported. Lists end with methods,
DeepSpeed's page with the keys of its config. What a guide's tables say of a name is what its page says.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.bed.world import ROOT
from torsh_distributed.migrate.deepspeed.config.known_keys import KNOWN
from torsh_distributed.migrate.deepspeed.config.setting import Setting, SettingGroup
from torsh_distributed.migrate.deepspeed.pipe.pipeline_engine import PipelineEngine
from torsh_distributed.migrate.deepspeed.surface.device_accelerator import get_accelerator
from torsh_distributed.migrate.deepspeed.surface.refused_names import REFUSED, RefusedName, refused_names
from torsh_distributed.migrate.deepspeed.training.deepspeed_engine import DeepSpeedEngine
from torsh_distributed.migrate.horovod.elastic import ElasticSampler, State, TorchState
from torsh_distributed.migrate.horovod.training.reducing_optimizer import ReducingOptimizer
from torsh_distributed.migrate.stand_in import STAND_INS, install, uninstall

TITLES = {"deepspeed": "DeepSpeed", "fairscale": "FairScale", "horovod": "Horovod"}
NONE_ABSENT = ("deepspeed",)
"""Libraries of which every listed name is there, or refused with a sentence."""
OBJECTS: dict[str, Any] = {
    "engine": DeepSpeedEngine,
    "pipeline_engine": PipelineEngine,
    "accelerator": get_accelerator(),
    "optimizer": ReducingOptimizer,
    "state": State,
    "torch_state": TorchState,
    "sampler": ElasticSampler,
}
"""What a list says of methods."""
_LISTS_MODULES = ", which has: "
"""In the error of a module that nothing else is said about."""


def listed(library: str) -> dict[str, dict[str, list[str]]]:
    """By module the names, each with the arguments that it takes by name."""
    text = (Path(__file__).with_name("names") / f"{library}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {module: calls_in(names) for module, _, names in (line.partition(":") for line in lines)}


def calls_in(text: str) -> dict[str, list[str]]:
    """`name(argument, …) name` as a dict."""
    return {
        name: [one.strip() for one in arguments.split(",")] if arguments else []
        for name, arguments in re.findall(r"(\w+)(?:\(([^)]*)\))?", text)
    }


def imported(name: str, names: dict[str, list[str]]) -> ModuleType | SimpleNamespace | str:
    """The module, or `refused` or `absent`; for an object the names that it has as methods."""
    if name in OBJECTS:
        # One that is None is there: `get_accelerator().Event` of a CPU, as in DeepSpeed.
        methods = {method: getattr(OBJECTS[name], method) or True for method in names if hasattr(OBJECTS[name], method)}
        return SimpleNamespace(**{**methods, **refused_names(name)})
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
        module = imported(name, names)
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


def verdicts_of(library: str) -> dict[str, set[str]]:
    """What becomes of each name, in any of its modules; the stand-in is installed."""
    found: dict[str, set[str]] = {}
    for module_name, names in listed(library).items():
        module = imported(module_name, names)
        for name in names:
            found.setdefault(name, set()).add(module if isinstance(module, str) else verdict(module, name))
    return found


def lacking(value: Any, arguments: list[str]) -> list[str]:
    """Arguments that a call does not take by name."""
    taken = inspect.signature(value).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return []
    return [name for name in arguments if name not in taken]


def rows_of(library: str) -> tuple[set[str], set[str]]:
    """The names in the first column of the guide's tables of calls: those with yes, and those with no."""
    yes: set[str] = set()
    no: set[str] = set()
    for line in (ROOT / "docs" / "guides" / f"from-{library}.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) >= 2 and re.match(r"(yes|no)\b", cells[1]):
            found = {part for code in re.findall(r"`([^`]*)`", cells[0]) for part in re.findall(r"\w+", code)}
            (yes if cells[1].startswith("yes") else no).update(found)
    return yes, no


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


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("library", TITLES)
def test_calls_take_their_arguments_by_name(library: str) -> None:
    problems = []
    for module_name, names in listed(library).items():
        module = imported(module_name, names)
        for name, arguments in names.items():
            if arguments and (missing := lacking(getattr(module, name), arguments)):
                problems.append(f"{module_name}.{name} takes no {missing}")
    assert problems == []


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("library", TITLES)
def test_the_guide_says_what_the_page_says(library: str) -> None:
    verdicts = verdicts_of(library)
    yes, no = rows_of(library)
    assert len(yes & set(verdicts)) > 20
    assert {name for name in yes & set(verdicts) if "present" not in verdicts[name]} == set()
    assert {name for name in (no - yes) & set(verdicts) if "present" in verdicts[name]} == set()


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
