"""Lazy exports: what a package's stub names can be imported, and importing the package costs none of it."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torsh_distributed
from torsh_distributed.lazy import exports

ROOT = Path(torsh_distributed.__path__[0])
STUBS = sorted(ROOT.rglob("__init__.pyi"))


def package_of(stub: Path) -> ModuleType:
    return importlib.import_module(".".join((ROOT.name, *stub.parent.relative_to(ROOT).parts)))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package with one lazy function, one lazy submodule, and a name that its module does not have."""
    folder = tmp_path / "sample_lazy"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from torsh_distributed.lazy import exports\n__all__, __getattr__, __dir__ = exports(__name__)\n"
    )
    (folder / "__init__.pyi").write_text(
        "from sample_lazy import tools as tools\n"
        "from sample_lazy.work import run as run\n"
        "from sample_lazy.work import walk as walk\n"
    )
    (folder / "tools.py").write_text("")
    (folder / "work.py").write_text("def run() -> str:\n    return 'ran'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("sample_lazy", "sample_lazy.tools", "sample_lazy.work"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("sample_lazy")


def test_a_module_is_imported_when_its_name_is_first_used(package: ModuleType) -> None:
    assert "sample_lazy.work" not in sys.modules
    assert package.run() == "ran"
    assert "sample_lazy.work" in sys.modules
    assert "run" in vars(package), "the second use does not ask again"


def test_a_name_of_the_package_itself_is_its_submodule(package: ModuleType) -> None:
    assert "sample_lazy.tools" not in sys.modules
    assert package.tools is sys.modules["sample_lazy.tools"]


def test_from_import_works_before_and_after_the_first_use(package: ModuleType) -> None:
    for _ in range(2):
        found: dict[str, object] = {}
        exec("from sample_lazy import run, tools", found)
        assert found["run"] is package.run
        assert found["tools"] is package.tools


def test_a_missing_name_is_an_attribute_error_that_names_the_package(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'sample_lazy' has no attribute 'jump'"):
        package.jump  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'jump' from 'sample_lazy'"):
        exec("from sample_lazy import jump")
    with pytest.raises(AttributeError, match=r"module 'sample_lazy\.work' has no attribute 'walk'"):
        package.walk  # noqa: B018


def test_dir_lists_every_name_before_any_is_used(package: ModuleType) -> None:
    assert package.__all__ == ["run", "tools", "walk"]
    assert {"run", "tools", "walk", "__name__"} <= set(dir(package))


def test_the_root_lists_its_version() -> None:
    assert "__version__" in dir(torsh_distributed)
    assert torsh_distributed.__version__.count(".") >= 1


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: str(stub.parent.relative_to(ROOT)))
def test_every_name_of_a_stub_can_be_imported(stub: Path) -> None:
    package = package_of(stub)
    names, _, _ = exports(package.__name__)
    assert names
    for name in names:
        assert getattr(package, name) is not None
    assert set(names) <= set(dir(package))
    assert set(names) <= set(package.__all__)


def test_no_name_of_a_stub_hides_a_submodule() -> None:
    """Importing a submodule sets it as an attribute, so a function of that name would depend on the import order."""
    hidden = set()
    for stub in STUBS:
        package = package_of(stub)
        modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
        own = {
            line.split()[3] for line in stub.read_text().splitlines() if line.startswith(f"from {package.__name__} ")
        }
        hidden |= {f"{package.__name__}.{name}" for name in (modules - own) & set(package.__all__)}
    assert hidden == set()


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["torsh_distributed", "torsh_distributed.errors", "torsh_distributed.events"])
def test_importing_it_imports_neither_torch_nor_pydantic(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'pydantic'}} & set(sys.modules)))"
    assert run_python(code) == "[]"


@pytest.mark.parametrize(
    "imports",
    ["import torsh_distributed, torch.distributed as dist", "import torch.distributed as dist, torsh_distributed"],
    ids=["ours first", "torch first"],
)
@pytest.mark.ranks
def test_our_backends_are_registered_in_both_import_orders(imports: str) -> None:
    code = f"{imports}; print([dist.is_backend_available(name) for name in ('shm', 'torsh', 'mpi4py')])"
    assert run_python(code) == "[True, True, True]"
