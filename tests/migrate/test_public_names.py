"""Every public name of Horovod and FairScale is here, refused with a sentence, or listed as absent on its page.

As for DeepSpeed (`deepspeed/surface/test_public_names.py`), whose names raise when they are used, not when imported:
`names/LIBRARY.txt` lists modules with their names, and a page of the reference says what becomes of each. A change that
loses or refuses one changes the page. A module without names in the list cannot be imported.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.bed.world import ROOT
from torsh_distributed.migrate.stand_in import STAND_INS, install, uninstall

TITLES = {"fairscale": "FairScale", "horovod": "Horovod"}
_LISTS_MODULES = ", which has: "
"""In the error of a module that nothing else is said about."""


def listed(library: str) -> dict[str, list[str]]:
    text = (Path(__file__).with_name("names") / f"{library}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {module: names.split() for module, _, names in (line.partition(":") for line in lines)}


def imported(name: str) -> ModuleType | str:
    """The module, or `refused` or `absent`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return "absent" if _LISTS_MODULES in str(error) else "refused"


def verdict(module: ModuleType, name: str) -> str:
    """What becomes of `from module import name`."""
    try:
        return "absent" if getattr(module, name) is None else "present"
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
        f"What becomes of the public names of {title} {version} under `torsh run --as {library}`. Importing a refused",
        "name or module raises; the message says what to use.",
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
    return "\n".join(lines).rstrip() + "\n"


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
    assert path_of(library).read_text() == page(library), f"python -m {__name__}"


if __name__ == "__main__":
    for one in sys.argv[1:] or TITLES:
        install(one)
        path_of(one).write_text(page(one))
