"""What every process of `torsh demo` runs: join, build the demo, train, report from rank 0."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from torsh_distributed import events
from torsh_distributed.checkpoint.files.checkpoint_directory import CheckpointDirectory
from torsh_distributed.cli.demo.progress_report import CheckpointStalls, TrainReport
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument, TorshError
from torsh_distributed.launch.worker.init import distributed
from torsh_distributed.plan import CheckpointConfig, Plan
from torsh_distributed.train import EfficiencyMeter, Engine, parallelize
from torsh_distributed.train.demos import DEMOS, Demo
from torsh_distributed.train.demos.demo_plan import plan_for

_WARM_UP_STEPS = 1
"""Not measured: the first step allocates what the others reuse."""


def main(argv: list[str]) -> None:
    """Train the demo named on the command line; every rank of the job runs this."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", required=True)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args(argv)
    plan = with_checkpoints(plan_for(options.demo, options.plan, options.steps), options.out)
    with distributed(plan):
        demo = DEMOS[options.demo](plan)
        # Of the whole model, before it is split over the ranks.
        num_params = sum(param.numel() for param in demo.model.parameters())
        device = process_group.device()
        example = _example(demo, plan, device)
        engine = parallelize(demo.model.to(device), demo.optimizer, plan, loss_fn=demo.loss_fn, example=example)
        meter = EfficiencyMeter(engine) if options.report else None
        report = _begin_report(demo, plan, is_elastic=engine.elastic is not None)
        if process_group.rank() == 0 and not is_joining(engine):
            _say_beginning(report, demo, plan, num_params)
        stalls = CheckpointStalls(plan.checkpoint.dir)
        events.subscribe(stalls.handle, events.CheckpointEvent)
        if not is_joining(engine):
            _resume(engine, report, own=_own_checkpoints(options.out))
        first = engine.num_steps
        for batch in engine.batches(demo.loader):
            if meter is not None and engine.num_steps == first + min(_WARM_UP_STEPS, plan.training.steps - first - 1):
                meter.start()
            engine.step(batch)
        if engine.num_steps % plan.checkpoint.every_steps:
            engine.save()
        engine.checkpoints.wait()
        measured = None if meter is None else meter.report()
        # On every rank: if forward communicates, no rank can sample alone.
        said = None if demo.sample is None else demo.sample(engine.unwrapped, device)
        if process_group.rank() == 0:
            _finish_report(report, demo, said, options.out, stalls.summary())
            if measured is not None:
                report.console.print(measured.table(), *measured.findings(), sep="\n")


def is_joining(engine: Engine) -> bool:
    """Whether the others train already, and this worker gets their state with the first batch."""
    return engine.elastic is not None and engine.elastic.is_joining


def with_checkpoints(plan: Plan, out: Path) -> Plan:
    """The plan with ten checkpoints in the demo's own directory, unless it says where they go."""
    if plan.checkpoint.enabled:
        return plan
    every = max(1, plan.training.steps // 10)
    section = CheckpointConfig(enabled=True, dir=str(_own_checkpoints(out)), every_steps=every, keep=2)
    return plan.replace(checkpoint=section)


def _own_checkpoints(out: Path) -> Path:
    return out / "checkpoints"


def _resume(engine: Engine, report: TrainReport, own: Path) -> None:
    """Go on where an interrupted run stopped; after one that was finished, begin again in the demo's own directory."""
    directory = CheckpointDirectory(engine.plan.checkpoint.dir)
    found = directory.complete_steps()
    newest = broadcast_object(found[0] if found else None, 0)
    if newest is None:
        return
    if newest >= engine.plan.training.steps:
        if Path(engine.plan.checkpoint.dir) != own:
            raise InvalidArgument(
                f"the run in {engine.plan.checkpoint.dir} is finished, at step {newest}",
                hint="set checkpoint.dir to another directory, or ask for more steps",
                steps=engine.plan.training.steps,
            )
        if process_group.rank() == 0:
            for step in found:
                directory.remove(step)
        return
    loaded = engine.load()
    if process_group.rank() == 0:
        report.console.print(f"resuming at step {loaded.step}, saved by {loaded.world_size} ranks", highlight=False)


def _example(demo: Demo, plan: Plan, device: torch.device) -> tuple[torch.Tensor] | None:
    """A microbatch of inputs, if the plan asks for measured layers."""
    if plan.mesh.pp == 1 or plan.pipeline.balance != "time":
        return None
    inputs, _ = next(iter(demo.loader))
    share = len(inputs) // (plan.mesh.resolve(process_group.world_size()).data_degree * plan.pipeline.num_microbatches)
    return (inputs[: max(1, share)].to(device),)


def _begin_report(demo: Demo, plan: Plan, *, is_elastic: bool) -> TrainReport:
    """Collects the steps on rank 0; on every rank of an elastic job, since any may become rank 0."""
    console = Console(width=110, soft_wrap=True)
    report = TrainReport(
        total_steps=plan.training.steps,
        log_every=plan.training.log_every,
        tokens_per_sample=demo.tokens_per_sample,
        console=console,
        is_shown=lambda: process_group.rank() == 0,
    )
    if process_group.rank() == 0 or is_elastic:
        events.subscribe(report.handle, events.StepEvent, events.CompileEvent)
    return report


def _say_beginning(report: TrainReport, demo: Demo, plan: Plan, num_params: int) -> None:
    report.console.print(
        f"training {demo.description}: {num_params:,} parameters on {process_group.world_size()} ranks, "
        f"backend {process_group.backend()}, batch {plan.training.batch_size}",
        highlight=False,
    )


def _finish_report(report: TrainReport, demo: Demo, said: str | None, out: Path, saved: str) -> None:
    curve = out / "loss.png"
    facts = {
        "model": demo.description,
        "world": f"{process_group.world_size()} ranks on {process_group.backend()}",
        "checkpoints": saved,
    }
    try:
        report.plot(curve, title=f"torsh demo {demo.name}, {facts['world']}")
        facts["loss curve"] = str(curve)
    except FeatureNotAvailable as error:
        facts["loss curve"] = f"not drawn: {error.message} ({error.hint})"
    report.console.print(report.summary(facts))
    if said is not None:
        report.console.print("the trained model says:")
        report.console.print(said, highlight=False, markup=False)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except TorshError as error:
        # The launcher shows the last lines of stderr as the cause: the readable form, without a traceback.
        sys.exit(f"{error.code}: {error}")
