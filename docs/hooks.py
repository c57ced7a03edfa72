"""What the site makes of the tree: navigation, API pages, the command reference, files that live outside docs/.

Pages are generated while the site is built, so they cannot fall behind the code.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "torsh_distributed"
RESULTS = ROOT / "benchmarks" / "results"
# Pages written elsewhere in the repository, by the name they have on the site.
ADOPTED = {"contributing.md": ROOT / "CONTRIBUTING.md", "changelog.md": ROOT / "CHANGELOG.md"}
# The guides in reading order: a first hour, then by task. A test holds it against the folder.
GUIDES = {
    "A first hour": [
        "launch",
        "plan",
        "engine",
        "your-model",
        "checkpoints",
        "eight-ranks-on-one-gpu",
        "why-does-it-hang",
    ],
    "Larger models": [
        "will-it-fit",
        "choosing-a-parallelism",
        "sharding",
        "offload",
        "mixture-of-experts",
        "optimizers",
        "same-losses",
    ],
    "Faster": ["why-is-it-slow", "speed", "slow-networks", "energy", "figures"],
    "Unattended": ["surviving-failures", "exactly-once", "dashboards", "security"],
    "On other machines": [
        *("on-a-cluster", "on-ssh", "on-slurm", "on-mpi", "on-kubernetes", "on-ray", "on-dask", "on-clouds"),
        "what-was-tried",
    ],
    "On devices": ["federated", "privacy-figures"],
    "Coming over": ["trainers", "from-torch", "from-deepspeed", "from-fairscale", "from-horovod"],
    "Underneath": ["collectives", "remote-calls", "parameter-server", "backends", "mpi", "stores"],
}


# ---- API pages ----------------------------------------------------------------------------------------------


def _exports(init: Path) -> dict[str, str]:
    """What the package of this `__init__.py` offers: name to the module it is in, from its stub or its own imports."""
    stub = init.with_suffix(".pyi")
    statements = ast.parse((stub if stub.exists() else init).read_text()).body
    imported = {
        alias.name: statement.module
        for statement in statements
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith(PACKAGE.name)
        for alias in statement.names
        if not _is_module(f"{statement.module}.{alias.name}")
    }
    if stub.exists():
        return imported
    for node in statements:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            return {name: imported[name] for name in ast.literal_eval(node.value) if name in imported}
    return {}


def _is_module(dotted: str) -> bool:
    path = SOURCE / dotted.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def _has_public_code(path: Path) -> bool:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = (node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds))
    return any(not name.startswith("_") for name in names)


def _dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def public_packages() -> dict[str, list[str]]:
    """The objects or modules to document, by page.

    An exported object is on the page of the innermost package that exports it. A package in which nothing is exported,
    and which is no room of one that exports, shows its public modules. The command line has a page of its own (`run` is
    its second entrance).
    """
    inits = {_dotted(init): init for init in sorted(PACKAGE.rglob("__init__.py"))}
    exports = {name: found for name, init in inits.items() if ".cli" not in name and (found := _exports(init))}
    pages: dict[str, set[str]] = {package: set() for package in exports}
    for path in {f"{home}.{name}" for found in exports.values() for name, home in found.items()}:
        home, _, name = path.rpartition(".")
        pages[max((package for package, found in exports.items() if found.get(name) == home), key=len)].add(path)
    found = {package: sorted(paths) for package, paths in pages.items()}
    for package, init in inits.items():
        is_room = any(f"{package}.".startswith(f"{name}.") for name in exports if name != PACKAGE.name)
        if ".cli" in package or is_room or package == PACKAGE.name:
            continue
        modules = (path for path in sorted(init.parent.glob("*.py")) if not path.name.startswith("_"))
        documented = [_dotted(path) for path in modules if _has_public_code(path)]
        if documented:
            found[package] = documented
    for path in sorted(PACKAGE.glob("*.py")):
        if not path.name.startswith("_") and path.stem != "run" and _has_public_code(path):
            found[_dotted(path)] = [_dotted(path)]
    found[PACKAGE.name] = [path for path in found[PACKAGE.name] if path.rpartition(".")[0] not in found]
    return found


def api_page(name: str, shown: list[str]) -> str:
    """Markdown that mkdocstrings turns into the reference of a package; its exported names come first, as links."""
    init = SOURCE / name.replace(".", "/") / "__init__.py"
    exports = _exports(init) if init.exists() else {}
    sections = [f"# {name}\n"]
    if exports:
        names = sorted(exports.items(), key=lambda pair: pair[0].lower())
        sections.append(", ".join(f"[`{each}`][{home}.{each}]" for each, home in names) + "\n")
    objects = {f"{home}.{each}" for each, home in exports.items()}
    for one in shown:
        level = 2 if one in objects or shown == [name] else 3
        if level == 3:
            sections.append(f"## {one.removeprefix(name + '.')}\n")
        heading = "      show_root_heading: true\n      show_root_toc_entry: true\n" if one in objects else ""
        sections.append(f"::: {one}\n    options:\n      heading_level: {level}\n{heading}")
    return "\n".join(sections)


# ---- the command line ---------------------------------------------------------------------------------------


def command_page() -> str:
    """Every command of `torsh` with its arguments and options, from the commands themselves."""
    from torsh_distributed.cli.app import app

    lines = ["# The torsh command", "", "Made from the commands' own help; `torsh COMMAND --help` says the same.", ""]
    lines += _describe_command(typer.main.get_command(app), "torsh")
    return "\n".join(lines)


def _describe_command(command: Any, path: str) -> list[str]:
    lines = [f"## {path}", "", (command.help or "").strip(), ""]
    rows = [_describe_parameter(parameter) for parameter in command.params if not _is_hidden(parameter)]
    if rows:
        lines += ["| | | default |", "|---|---|---|", *rows, ""]
    for name, child in getattr(command, "commands", {}).items():
        lines += _describe_command(child, f"{path} {name}")
    return lines


def _is_hidden(parameter: Any) -> bool:
    return getattr(parameter, "hidden", False) or parameter.name in ("install_completion", "show_completion", "help")


def _describe_parameter(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        shown = parameter.name.upper() + ("…" if parameter.nargs == -1 else "")
        names = f"`{shown if parameter.required else f'[{shown}]'}`"
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    default = parameter.default
    is_shown = not (default is None or default is False or default in ("", (), []) or callable(default))
    return f"| {names} | {text} | {f'`{default}`' if is_shown else ''} |"


# ---- what mkdocs calls --------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay out the navigation: the guides as above, the rest from the files that are there."""
    docs = Path(config.docs_dir)

    def pages(folder: str) -> list[str]:
        return [str(path.relative_to(docs)) for path in sorted((docs / folder).glob("*.md"))]

    api = [{name: f"reference/api/{name}.md"} for name in sorted(public_packages())]
    sections: list[tuple[str, list[Any]]] = [
        ("Guides", [{title: [f"guides/{name}.md" for name in names]} for title, names in GUIDES.items()]),
        ("Reference", [*pages("reference"), "reference/cli.md", {"API": api}]),
        ("Benchmarks", ["benchmarks.md"]),
        ("Decisions", ["decisions/README.md", *(page for page in pages("decisions") if "README" not in page)]),
        ("Project", ["who-does-what.md", "releasing.md", *(name for name, path in ADOPTED.items() if path.exists())]),
    ]
    config.nav = ["index.md", *({title: found} for title, found in sections if found)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and the files that are kept outside docs/."""
    from mkdocs.structure.files import File

    generated = {f"reference/api/{name}.md": api_page(name, found) for name, found in public_packages().items()}
    generated["reference/cli.md"] = command_page()
    for uri, text in generated.items():
        files.append(File.generated(config, uri, content=text))
    outside = {f"benchmarks/{path.name}": path for path in RESULTS.glob("*.*")}
    outside |= {uri: path for uri, path in ADOPTED.items() if path.exists()}
    for uri, path in outside.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that work in the repository are made to work on the site."""
    if page.file.src_uri == "benchmarks.md":
        return markdown.replace("](../benchmarks/results/", "](benchmarks/")
    if page.file.src_uri.startswith("guides/"):
        return markdown.replace("](../../benchmarks/results/", "](../benchmarks/")
    if page.file.src_uri in ADOPTED:
        return markdown.replace("](docs/", "](")
    return markdown
