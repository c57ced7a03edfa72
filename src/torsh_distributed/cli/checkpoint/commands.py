"""`torsh checkpoint`: look at checkpoints, verify, compare, remove and exchange them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from torsh_distributed.checkpoint.files.block_hashes import damaged
from torsh_distributed.checkpoint.files.checkpoint_directory import (
    REQUEST,
    CheckpointDirectory,
    StepLoss,
    is_written_to,
    steps_to_remove,
)
from torsh_distributed.checkpoint.files.manifest import MARKER, Manifest, read_manifest
from torsh_distributed.checkpoint.files.verification import find_damage, foreign_files, read_index
from torsh_distributed.errors import CheckpointError
from torsh_distributed.terminal_text import neutral

app = typer.Typer(
    help="Look at checkpoints, verify, compare, remove and exchange them.", add_completion=False, no_args_is_help=True
)

Place = Annotated[Path, typer.Argument(help="A directory of checkpoints, or one of its steps.")]
Step = Annotated[int | None, typer.Option(help="The step; the newest by default.")]


@app.callback()
def _group() -> None:
    """Look at checkpoints, verify, compare, remove and exchange them."""


@app.command("ls")
def list_checkpoints(directory: Place) -> None:
    """List the checkpoints of a directory, newest first."""
    table = Table("step", "saved", "loss", "size", "ranks", "mesh", "why")
    found = _existing(directory)
    for path in found:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            problem = Text(neutral(error.message), style="red")
            table.add_row(path.name.removeprefix("step-").lstrip("0") or "0", problem)
            continue
        one = manifest.metadata
        table.add_row(
            str(one.step),
            _time(one.time),
            "" if one.loss is None else f"{one.loss:.4f}",
            _size(manifest.num_bytes),
            str(one.world_size),
            neutral(_mesh(one.mesh)),
            neutral(one.reason),
        )
    Console(soft_wrap=True, markup=False).print(table)


@app.command("show")
def show(directory: Place, step: Step = None) -> None:
    """Show what a checkpoint holds: metadata, files, tensors."""
    path, manifest = _one(directory, step)
    one = manifest.metadata
    table = Table(show_header=False, title=str(path), title_justify="left")
    rows = {
        "step": f"{one.step}, epoch {one.epoch}",
        "saved": f"{_time(one.time)} ({one.reason})",
        "loss": "" if one.loss is None else f"{one.loss:.6g}",
        "learning rate": "" if one.learning_rate is None else f"{one.learning_rate:.6g}",
        "world": f"{one.world_size} ranks, {_mesh(one.mesh)}",
        "git commit": one.git_commit or "",
        "plan": one.plan_hash or "",
        "versions": ", ".join(f"{name} {version}" for name, version in one.versions.items()),
        "files": f"{len(manifest.files)}, {_size(manifest.num_bytes)}"
        + (f", {manifest.compression}" if manifest.compression else ""),
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, neutral(value))
    console = Console(soft_wrap=True, markup=False)
    console.print(table)
    index = read_index(path, manifest)
    tensors = Table("tensor", "dtype", "shape", "pieces")
    for name, tensor in sorted(index.tensors.items()):
        tensors.add_row(
            neutral(name), tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar", str(len(tensor.boxes))
        )
    console.print(tensors)


@app.command("verify")
def verify(
    directory: Place,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every step of the directory, not the newest alone.")] = False,
) -> None:
    """Read a checkpoint and compare every byte's hash with what was written; exit status 1 if anything differs."""
    paths = _existing(directory) if every else [_one(directory, step)[0]]
    has_failed = False
    for path in paths:
        try:
            manifest = read_manifest(path)
            with _progress(f"verifying {path.name}", manifest.num_bytes) as advance:
                damage = find_damage(path, manifest, progress=advance)
            if damage:
                raise damaged(path, damage)
            read_index(path, manifest)
        except CheckpointError as error:
            has_failed = True
            typer.echo(neutral(error.message))
            continue
        others = foreign_files(path, manifest)
        note = neutral(f"; not part of it: {', '.join(others)}") if others else ""
        typer.echo(f"{path.name} is whole: {len(manifest.files)} files, {_size(manifest.num_bytes)}{note}")
    if has_failed:
        raise typer.Exit(1)


@app.command("diff")
def diff(first: Place, second: Place) -> None:
    """Compare two checkpoints, tensor by tensor; exit status 1 if they differ."""
    from torsh_distributed.cli.checkpoint.exchange import print_differences, verified

    both = [_one(first, None), _one(second, None)]
    with _progress("verifying both", sum(manifest.num_bytes for _, manifest in both)) as advance:
        one, other = (verified(path, manifest, advance) for path, manifest in both)
    if print_differences(one, other):
        raise typer.Exit(1)


@app.command("prune")
def prune(
    directory: Place,
    keep: Annotated[int, typer.Option(min=1, help="Number of latest checkpoints to keep.")] = 5,
    keep_best: Annotated[int, typer.Option(min=0, help="Number of checkpoints of lowest loss to keep as well.")] = 1,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep steps that are a multiple of this.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove old checkpoints, once the newest has been verified."""
    from torsh_distributed.checkpoint.files.checkpoint_directory import DirectoryLock

    place = CheckpointDirectory(directory)
    path, manifest = _one(directory, None)
    lock = None if dry_run else DirectoryLock(place)
    try:
        with _progress(f"verifying {path.name}", manifest.num_bytes) as advance:
            damage = find_damage(path, manifest, progress=advance)
        if damage:
            raise damaged(path, damage)
        found = []
        for step in place.complete_steps():
            try:
                found.append(StepLoss(step, read_manifest(place.step_path(step)).metadata.loss))
            except CheckpointError as error:
                typer.echo(f"not counted, and left as it is: {neutral(error.message)}")
        gone = steps_to_remove(found, keep=keep, keep_best=keep_best, keep_every=keep_every)
        for step in gone:
            if not dry_run:
                place.remove(step)
            typer.echo(f"{'would remove' if dry_run else 'removed'} {place.step_path(step).name}")
        typer.echo(f"{len(found) - len(gone)} of {len(found)} checkpoints stay")
    finally:
        if lock is not None:
            lock.release()


@app.command("now")
def now(directory: Place) -> None:
    """Ask the job that writes to a directory to save at once; it does within a second or a step."""
    place = CheckpointDirectory(directory)
    if not is_written_to(place):
        raise CheckpointError(
            f"no job writes checkpoints to {directory}",
            hint="name the checkpoint.dir of a job that is training",
        )
    (directory / REQUEST).touch()
    typer.echo("asked; `torsh checkpoint ls` shows it once it is saved")


@app.command("export")
def export(
    directory: Place,
    out: Annotated[Path, typer.Argument(help="A new directory for the files.")],
    step: Step = None,
    safetensors: Annotated[
        bool,
        typer.Option("--safetensors", help="As safetensors, in shards with an index, as from_pretrained reads them."),
    ] = True,
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Size of a file, in 10**9 bytes.")] = 5.0,
    key: Annotated[str, typer.Option(help="Which of the saved objects.")] = "model",
) -> None:
    """Write the model of a checkpoint as safetensors files."""
    from torsh_distributed.cli.checkpoint.exchange import export_model

    path, manifest = _one(directory, step)
    with _progress(f"verifying and exporting {path.name}", None) as advance:
        files = export_model(path, manifest, out, key=key, shard_bytes=int(shard_gb * 1e9), progress=advance)
    typer.echo(f"wrote {len(files)} files to {out}")


@app.command("import")
def import_model(
    source: Annotated[Path, typer.Argument(help="A safetensors file, or a directory of them.")],
    directory: Annotated[Path, typer.Argument(help="The directory of checkpoints; the model becomes its step 0.")],
) -> None:
    """Make a checkpoint of a model in safetensors files, to be loaded with model_only."""
    from torsh_distributed.cli.checkpoint.exchange import import_files

    with _progress(f"importing {source.name}", None) as advance:
        path = import_files(source, directory, advance)
    typer.echo(f"wrote {path}")


def _existing(directory: Path) -> list[Path]:
    if (directory / MARKER).exists():
        return [directory]
    place = CheckpointDirectory(directory)
    found = [place.step_path(step) for step in place.steps()]
    if not found:
        raise CheckpointError(f"there is no checkpoint in {directory}", hint="name the checkpoint.dir of a job")
    for path in found:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link, which is not followed", hint="name its target instead")
    return found


def _one(directory: Path, step: int | None) -> tuple[Path, Manifest]:
    """A checkpoint and its manifest: the directory itself, or a step of it."""
    found = _existing(directory)
    if step is not None:
        wanted = CheckpointDirectory(directory).step_path(step)
        found = [path for path in found if path == wanted]
        if not found:
            raise CheckpointError(f"there is no checkpoint of step {step} in {directory}")
    return found[0], read_manifest(found[0])


class _progress:  # noqa: N801 (used like a function)
    """A bar on stderr while bytes are read; none if nobody watches."""

    def __init__(self, text: str, total: int | None) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> _progress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, num_bytes: int) -> None:
        self._bar.advance(self._task, num_bytes)


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _mesh(mesh: dict[str, int]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in mesh.items() if degree > 1) or "one rank"
