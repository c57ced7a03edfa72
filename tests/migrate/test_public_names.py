"""A kept table of the public names of other libraries, by module: present, refused (with a sentence), or absent.

`names/LIBRARY.ini` has a section for each module; one that cannot be imported has `module = refused` or `absent` in it.
To change it, change the list of names and run `python -m tests.migrate.test_public_names LIBRARY`, which writes what
becomes of each.
"""

from __future__ import annotations

import configparser
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from torsh_distributed.migrate.deepspeed.surface.refused_names import RefusedName
from torsh_distributed.migrate.stand_in import install, uninstall

NAMES = Path(__file__).with_name("names")
LIBRARIES = sorted(path.stem for path in NAMES.glob("*.ini"))
VERDICTS = ("present", "refused", "absent")
_LISTS_MODULES = ", which has: "
"""How the error ends for a module that nothing else is said about."""


def read(library: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(delimiters=("=",))
    found.read(NAMES / f"{library}.ini")
    return found


def imported(name: str) -> ModuleType | str:
    """The module, or `refused` or `absent`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return "absent" if _LISTS_MODULES in str(error) else "refused"


def verdict(module: ModuleType, name: str) -> str:
    """What becomes of `from module import name`."""
    try:
        found = getattr(module, name)
        return "refused" if isinstance(found, RefusedName) else "present" if found is not None else "absent"
    except AttributeError:
        return "absent"
    except ImportError:
        return "refused"


def verdicts(library: str) -> dict[str, dict[str, str]]:
    """By module of the table: what is found of it now, in the form of the table."""
    found: dict[str, dict[str, str]] = {}
    table = read(library)
    for section in table.sections():
        module = imported(section)
        if isinstance(module, str):
            found[section] = {"module": module}
            continue
        names = sorted({name for key in VERDICTS for name in table[section].get(key, "").split()})
        by_name = {name: verdict(module, name) for name in names}
        found[section] = {
            key: " ".join(name for name in names if by_name[name] == key) for key in VERDICTS if key in by_name.values()
        }
    return found


@pytest.fixture
def _installed(request: pytest.FixtureRequest) -> Iterator[None]:
    library = request.getfixturevalue("library")
    install(library)
    yield
    uninstall(library)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_of_the_library_has_the_verdict_that_the_table_says(library: str) -> None:
    table = read(library)
    kept = {
        section: {key: " ".join(sorted(value.split())) for key, value in table[section].items()}
        for section in table.sections()
    }
    assert verdicts(library) == kept


if __name__ == "__main__":
    for one in sys.argv[1:] or LIBRARIES:
        install(one)
        written = configparser.ConfigParser(delimiters=("=",))
        written.read_dict(verdicts(one))
        with (NAMES / f"{one}.ini").open("w") as file:
            written.write(file)
