"""The site: every public package and command has a page, every page a place in the navigation."""

from __future__ import annotations

import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import torsh_distributed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def leaves(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(part)]


def load(path: str) -> object:
    """A module, or an object in one, by its dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.slow
def test_every_exported_name_is_documented_once(hooks: ModuleType) -> None:
    pages = hooks.public_packages()
    shown = [path for page in pages.values() for path in page]
    assert len(shown) == len(set(shown))
    documented = {id(load(path)) for path in shown}
    for found in pkgutil.walk_packages(torsh_distributed.__path__, "torsh_distributed."):
        if not found.ispkg or ".cli" in found.name or "._" in found.name:
            continue
        package = importlib.import_module(found.name)
        for name in getattr(package, "__all__", ()):
            assert found.name in pages
            value = getattr(package, name)
            is_documented = id(value) in documented or getattr(value, "__module__", "") in shown
            assert is_documented or not callable(value), f"{found.name}.{name}"


def test_a_package_without_exports_shows_its_modules(hooks: ModuleType) -> None:
    page = hooks.api_page("a.b", ["a.b.c", "a.b.d"])
    assert [line for line in page.splitlines() if line.startswith(("#", ":::"))] == [
        "# a.b", "## c", "::: a.b.c", "## d", "::: a.b.d",
    ]  # fmt: skip


def test_every_command_and_option_is_on_the_command_page(hooks: ModuleType) -> None:
    page = hooks.command_page()
    for words in ("torsh run", "torsh demo", "torsh plan validate"):
        assert f"## {words}\n" in page
    assert "| `--max-restarts` |" in page
    assert "--install-completion" not in page


def test_every_page_has_one_place_in_the_navigation(hooks: ModuleType) -> None:
    docs = ROOT / "docs"
    config = hooks.on_config(SimpleNamespace(docs_dir=str(docs), nav=None))
    placed = leaves(config.nav)
    assert len(placed) == len(set(placed))
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert written <= set(placed)
    assert all((docs / page).exists() or page.startswith("reference/") or page in hooks.ADOPTED for page in placed)
