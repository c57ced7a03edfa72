"""A whole command of another launcher: whose it is, and the line of `torsh run` with a plan that does the same."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.launchers import mpirun_options
from torsh_distributed.migrate.launchers.accelerate_config import AccelerateConfig
from torsh_distributed.migrate.launchers.accelerate_options import read_accelerate
from torsh_distributed.migrate.launchers.line_draft import LineDraft, read_options
from torsh_distributed.migrate.launchers.torchrun_options import TORCHRUN_OPTIONS
from torsh_distributed.migrate.report import KeyVerdict, MigrationReport, Verdict
from torsh_distributed.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class LaunchTranslation:
    """The same job under `torsh run`."""

    words: tuple[str, ...]
    """The command, beginning with `torsh run`; `{plan}` stands for the plan's file."""
    env: dict[str, str]
    """Variables to set before it."""
    plan: Plan | None
    """How to train, where the line said so."""
    report: MigrationReport

    def text(self, plan_file: str = "plan.toml") -> str:
        """The command as a shell reads it."""
        words = [plan_file if word == "{plan}" else word for word in self.words]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        # $NODE_RANK is for the shell.
        return " ".join([*variables, *(word if word.startswith("$") else shlex.quote(word) for word in words)])


def translate_command(words: Sequence[str]) -> LaunchTranslation:
    """The job of a command of torchrun, mpirun, accelerate, deepspeed or horovodrun, under `torsh run`.

    Raises InvalidArgument for other commands and for options that the launcher does not have.
    """
    env, rest = _variables(list(words))
    kind, arguments = _launcher(rest)
    made = _TRANSLATORS[kind](arguments)
    return LaunchTranslation(words=made.words, env={**env, **made.env}, plan=made.plan, report=made.report)


def _variables(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Assignments before a command."""
    env = {}
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return env, words


def _launcher(words: list[str]) -> tuple[str, list[str]]:
    name = Path(words[0]).name if words else ""
    if name.startswith("python") and words[1:2] == ["-m"] and len(words) > 2:
        module = {
            "torch.distributed.run": "torchrun",
            "torch.distributed.launch": "torchrun",
            "accelerate.commands.launch": "accelerate",
        }.get(words[2], "")
        if module:
            return module, words[3:]
    if name == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate", words[2:]
    if name == "accelerate-launch":
        return "accelerate", words[1:]
    known = {"mpiexec": "mpirun", "orterun": "mpirun", "mpiexec.hydra": "mpirun", "horovodrun": "horovod"}
    kind = known.get(name, name)
    if kind in _TRANSLATORS and kind != "accelerate":
        return kind, words[1:]
    raise InvalidArgument(
        f"{name or 'an empty line'} is not a launcher that is known here",
        hint="known: torchrun, python -m torch.distributed.run, mpirun, accelerate launch, deepspeed, horovodrun",
    )


def _torchrun(words: list[str]) -> LaunchTranslation:
    draft = LineDraft("torchrun")
    program = read_options(draft, words, TORCHRUN_OPTIONS)
    return _finished(draft, program)


def _mpirun(words: list[str]) -> LaunchTranslation:
    draft = LineDraft("mpirun")
    program = read_options(draft, words, mpirun_options.MPIRUN_OPTIONS)
    mpirun_options.place(draft)
    draft.note(
        "mpirun",
        ["…"],
        Verdict.EQUIVALENT,
        "td.init()",
        "add --mpi if the script calls mpi4py itself; ranks are in RANK",
    )
    return _finished(draft, _without_python(program))


def _accelerate(words: list[str]) -> LaunchTranslation:
    values, options, env, program = read_accelerate(words)
    config = AccelerateConfig(values)
    plan, report = config.to_plan()
    line = ["torsh", "run", *config.launch_options(), *options, "--plan", "{plan}", *program]
    return LaunchTranslation(words=tuple(line), env=env, plan=plan, report=report)


def _as_library(library: str) -> Callable[[list[str]], LaunchTranslation]:
    def translate(words: list[str]) -> LaunchTranslation:
        """The line stays as it is behind `--as`."""
        means = f"torsh run --as {library}"
        entry = KeyVerdict(library, shlex.join(words), Verdict.HONOURED, means, "it reads these options itself")
        report = MigrationReport(library, (entry,))
        return LaunchTranslation(words=("torsh", "run", "--as", library, *words), env={}, plan=None, report=report)

    return translate


def _finished(draft: LineDraft, program: list[str]) -> LaunchTranslation:
    if not program:
        raise InvalidArgument(
            f"{draft.launcher}: there is no script in the line", hint="options come before the script"
        )
    report = MigrationReport(draft.launcher, tuple(draft.entries))
    words = ("torsh", "run", *draft.options, *program)
    return LaunchTranslation(words=words, env=draft.env, plan=None, report=report)


def _without_python(program: list[str]) -> list[str]:
    """`python train.py` as `torsh run` takes it."""
    if not program or not Path(program[0]).name.startswith("python"):
        return program if program[:1] and program[0].endswith(".py") else ["--no-python", *program]
    rest = [word for index, word in enumerate(program[1:]) if not (word == "-u" and index == 0)]
    return ["--module", *rest[1:]] if rest[:1] == ["-m"] else rest


_TRANSLATORS: dict[str, Callable[[list[str]], LaunchTranslation]] = {
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "accelerate": _accelerate,
    "deepspeed": _as_library("deepspeed"),
    "horovod": _as_library("horovod"),
}
