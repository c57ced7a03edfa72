"""Names in backticks exist: commands, options, plan keys, files, modules, members and names of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.names import FOREIGN, Mention, mentions, mentions_in, problem_of


@pytest.mark.slow
def test_what_stands_in_backticks_exists() -> None:
    wrong = [(mention, problem_of(mention)) for mention in mentions()]
    assert [f"{mention.place}: `{mention.text}`: {problem}" for mention, problem in wrong if problem] == []


def test_a_foreign_name_is_still_named_somewhere() -> None:
    texts = "\n".join(mention.text for mention in mentions())
    assert [name for name in sorted(FOREIGN) if name not in texts] == []


# ---- the check itself


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torsh serve", "torsh has no command serve"),
        ("torsh plan burn p.toml", "torsh plan has no command burn"),
        ("torsh run --tables train.py", "torsh run has no option --tables"),
        ("--no-such-option", "no command has the option --no-such-option"),
        ("mesh.tpp", "[mesh] of a plan has no key tpp"),
        ("training.steps_s = 3", "[training] of a plan has no key steps_s"),
        ("[meshes]", "a plan has no section [meshes]"),
        ("comm/no_such_folder", "no file or folder is called comm/no_such_folder"),
        ("no_such_module.py", "no file or folder is called no_such_module.py"),
        ("World.from_nowhere()", "the code has no from_nowhere"),
        ("NeighbourReplicas.keep()", "NeighbourReplicas has no keep"),
        ("td.no_such_name", "td.no_such_name does not exist"),
        ("torsh_distributed.comm.no_such", "torsh_distributed.comm.no_such does not exist"),
        ("torch.no_such_module.name", "torch has no torch.no_such_module.name"),
        ("no_such_function(x)", "the code has no no_such_function"),
        ("engine.no_such_method", "the code has no no_such_method"),
    ],
)
def test_a_wrong_name_is_found(tmp_path: Path, text: str, problem: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nSee `{text}`.\n")
    (mention,) = mentions_in(page)
    assert (mention.line, problem_of(mention)) == (3, problem)


@pytest.mark.parametrize(
    "text",
    [
        "torsh run --nproc-per-node 2 train.py --own-option", "torsh plan show|validate", "torsh run …", "--elastic",
        "mesh.tp", "mesh.tp = 2", "[mesh]", "[dev]", "comm/store",
        "launch/worker/init.py", "checkpoint.files", "Plan.load",
        "td.init()", "torsh_distributed.elastic.inject", "torch.distributed.all_reduce", "all_reduce", "x + y", "_s",
    ],
)  # fmt: skip
def test_a_right_one_passes(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text("")
    assert problem_of(Mention(page, 1, text)) is None


def test_docstrings_are_read_and_code_is_not(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""Says `one`."""\n\nx = "`two`"\n\n\ndef f():\n    """First.\n\n    Then `three`, in ``four``.\n    """\n'
    )
    assert [(mention.line, mention.text) for mention in mentions_in(module)] == [(1, "one"), (9, "three"), (9, "four")]


def test_blocks_and_what_was_left_out_are_passed_over(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\n`a`\n```\n\n## Left out on purpose\n\n`b`\n\n## Then\n\n`c`\n")
    assert [mention.text for mention in mentions_in(page)] == ["c"]
