"""`torsh migrate`: what coming over from another library takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument, IoError

_TABLE_WIDTH = 120
"""Columns below which a table of five would break words; the verdicts are then one line each."""


class _FileOrCommand(TyperGroup):
    """`torsh migrate FILE` is `torsh migrate config FILE`."""

    default_command = "config"

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: typer has its own click
        is_command = not args or args[0] in self.commands or args[0] in ("-h", "--help")
        return list(super().parse_args(ctx, args if is_command else [self.default_command, *args]))


app = typer.Typer(cls=_FileOrCommand, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _migrate() -> None:
    """Make plans of other libraries' configs, read their checkpoints, and look at scripts of theirs."""


@app.command()
def config(
    file: Annotated[Path, typer.Argument(help="A config of another library, such as ds_config.json.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan here.")] = None,
    kind: Annotated[
        str | None, typer.Option("--from", metavar="LIBRARY", help="Whose config it is. Default: found from its keys.")
    ] = None,
    world: Annotated[
        int | None, typer.Option("--world", min=1, metavar="N", help="Ranks that the plan is for.")
    ] = None,
    fills: Annotated[
        list[str] | None,
        typer.Option("--fill", metavar="KEY=VALUE", help='A value for a key that is "auto". Repeatable.'),
    ] = None,
    version: Annotated[
        str | None, typer.Option("--version", metavar="V", help="The library's version, whose defaults hold.")
    ] = None,
    *,
    without_refused: Annotated[
        bool, typer.Option("--without-refused", help="Write the plan even if keys are refused: it does without them.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="DeepSpeed: a key that it does not have, and ignores, is an error.")
    ] = False,
) -> None:
    """Make a plan of a config, and say what becomes of every key: honoured, equivalent, a hint, or refused and why.

    This is what `torsh migrate FILE` does. Exits with status 1 if a key is refused.
    """
    from rich.console import Console

    from torsh_distributed.migrate.config_kinds import translate_config

    plan, report = translate_config(
        file, kind=kind, strict=strict, world_size=world, fills=_fills(fills or ()), version=version
    )
    console = Console()
    if console.width >= _TABLE_WIDTH:
        console.print(report.table())
    else:
        console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if not without_refused:
        report.require_accepted()
    if output is not None:
        plan.save(output, with_defaults=False)
        typer.echo(f"wrote {output}")


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def command(
    words: Annotated[
        list[str], typer.Argument(help="A line of torchrun, mpirun, accelerate launch, …", metavar="LINE")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan here.")] = None,
    *,
    without_refused: Annotated[
        bool, typer.Option("--without-refused", help="Print the line even if options are refused.")
    ] = False,
) -> None:
    """Print the line of `torsh run` that does what another launcher's line does, and the verdict on its options.

    Put -- before the line. What the line says about training, such as precision or shards, becomes a plan.
    """
    from rich.console import Console

    from torsh_distributed.migrate.launchers.launch_command import translate_command

    found = translate_command(words)
    Console(stderr=True).print(found.report.table())
    if not without_refused:
        found.report.require_accepted()
    typer.echo(found.text(str(output or "plan.toml")))
    if found.plan is not None and output is not None:
        found.plan.save(output, with_defaults=False)
        typer.echo(f"wrote {output}", err=True)
    elif found.plan is not None:
        typer.echo("write the plan with -o plan.toml", err=True)


@app.command()
def checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            help="DeepSpeed's directory or one of its tags, a file of torch.save, a directory of torch's checkpoints."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write to.")],
    tag: Annotated[str | None, typer.Option("--tag", metavar="TAG", help="A tag; else the newest.")] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="FORMAT", help="Write the weights alone: safetensors or bin (torch.save)."),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Format of --weights: fp32, bf16, fp16.")
    ] = "fp32",
    inert: Annotated[
        list[str] | None,
        typer.Option("--inert", metavar="CLASS", help="A class that the files may name; read as a record. Repeatable."),
    ] = None,
    model_key: Annotated[
        str | None,
        typer.Option("--model-key", metavar="KEY", help="torch: where the model is in a file that has several."),
    ] = None,
) -> None:
    """Read a checkpoint of DeepSpeed (ZeRO 0 to 3, universal) or of plain torch, and write it as our checkpoint.

    What is written loads under any plan and at any world size, with the optimizer's state. With --weights, the model
    alone, as DeepSpeed's zero_to_fp32.py writes it. Files are read without pickle's code: nothing in them is run.
    """
    from torsh_distributed.migrate import foreign_state
    from torsh_distributed.migrate.config_kinds import open_any_checkpoint

    if weights not in (None, "safetensors", "bin"):
        raise InvalidArgument(f"--weights {weights} is not a format", hint="write safetensors or bin")
    if not source.exists():
        raise InvalidArgument(
            f"there is no file or directory {source}",
            hint="name a file of torch.save, or a directory of torch's or DeepSpeed's checkpoints",
        )
    saved = open_any_checkpoint(source, tag, weights_only=weights is not None, model_key=model_key, inert=inert or ())
    if weights is None:
        typer.echo(f"wrote {foreign_state.keep_foreign(saved, out)}")
        return
    for path in foreign_state.write_foreign_weights(saved, out, file_format=weights, dtype=dtype):
        typer.echo(f"wrote {path}")


@app.command()
def check(
    scripts: Annotated[list[Path], typer.Argument(help="Python scripts; they are read, not run.")],
    diff: Annotated[bool, typer.Option("--diff", help="Print the proposed change.")] = False,
) -> None:
    """List the distributed calls of scripts, with our counterpart of each."""
    from torsh_distributed.migrate.scripts.script_changes import proposed_change
    from torsh_distributed.migrate.scripts.script_check import check_script

    for script in scripts:
        try:
            source = script.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise IoError("the script cannot be read", script=str(script), reason=str(error)) from error
        if diff:
            typer.echo(proposed_change(source, str(script)), nl=False)
            continue
        found = check_script(source, str(script))
        for one in found:
            counterpart = f" → {one.counterpart}" if one.counterpart else ""
            typer.echo(f"{script}:{one.line}: {one.call}{counterpart}: {one.note}")
            for entry in one.keywords:
                means = f" → {entry.means}" if entry.means else ""
                reason = f": {entry.reason}" if entry.reason else ""
                typer.echo(f"    {entry.verdict} {entry.key} = {entry.value}{means}{reason}")
        if not found:
            typer.echo(f"{script}: no distributed calls")


def _fills(given: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """`key=value` lines, each value as JSON; a value that is not JSON is text."""
    from torsh_distributed.migrate.deepspeed.config.hjson_format import parse_hjson
    from torsh_distributed.plan.reading.limits import MalformedError

    found: dict[str, Any] = {}
    for line in given:
        key, equals, text = line.partition("=")
        if not equals:
            raise InvalidArgument(f"--fill {line} has no value", hint="write --fill key=value")
        try:
            found[key] = parse_hjson(text) if text.lstrip()[:1] in ("{", "[", '"', "'") else _scalar(text)
        except MalformedError as error:
            raise InvalidArgument(f"--fill {line}: {error.reason}", hint="write the value as JSON") from None
    return found


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
