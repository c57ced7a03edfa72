"""What every process of `torsh demo` runs: join, build the demo, train, report from rank 0."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from torsh_distributed import events
from torsh_distributed.cli.demo.demo_plan import plan_for
from torsh_distributed.cli.demo.progress_report import TrainReport
from torsh_distributed.comm.backends.capabilities import choose_backend
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import FeatureNotAvailable, TorshError
from torsh_distributed.launch.worker.init import distributed
from torsh_distributed.plan import Plan
from torsh_distributed.train import EfficiencyMeter, parallelize
from torsh_distributed.train.demos import DEMOS, Demo

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
    plan = plan_for(options.demo, options.plan, options.steps)
    # A demo runs with as many workers as requested; on the CPU if there are fewer GPUs than that.
    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device_type = "cuda" if 0 < num_workers <= torch.cuda.device_count() else "cpu"
    with distributed(plan, backend=choose_backend(plan.distributed.backend, device_type=device_type)):
        demo = DEMOS[options.demo](plan)
        # Of the whole model, before it is split over the ranks.
        num_params = sum(param.numel() for param in demo.model.parameters())
        device = process_group.device() if device_type == "cuda" else torch.device("cpu")
        example = _example(demo, plan, device)
        engine = parallelize(demo.model.to(device), demo.optimizer, plan, loss_fn=demo.loss_fn, example=example)
        meter = EfficiencyMeter(engine) if options.report else None
        report = _begin_report(demo, plan, num_params)
        for batch in engine.batches(demo.loader):
            if meter is not None and engine.num_steps == min(_WARM_UP_STEPS, plan.training.steps - 1):
                meter.start()
            engine.step(batch)
        measured = None if meter is None else meter.report()
        # On every rank: if forward communicates, no rank can sample alone.
        said = None if demo.sample is None else demo.sample(engine.unwrapped)
        if process_group.rank() == 0:
            _finish_report(report, demo, said, options.out)
            if measured is not None:
                report.console.print(measured.table(), *measured.findings(), sep="\n")


def _example(demo: Demo, plan: Plan, device: torch.device) -> tuple[torch.Tensor] | None:
    """A microbatch of inputs, if the plan asks for measured layers."""
    if plan.mesh.pp == 1 or plan.pipeline.balance != "time":
        return None
    inputs, _ = next(iter(demo.loader))
    share = len(inputs) // (plan.mesh.resolve(process_group.world_size()).data_degree * plan.pipeline.num_microbatches)
    return (inputs[: max(1, share)].to(device),)


def _begin_report(demo: Demo, plan: Plan, num_params: int) -> TrainReport:
    console = Console(width=110, soft_wrap=True)
    report = TrainReport(
        total_steps=plan.training.steps,
        log_every=plan.training.log_every,
        tokens_per_sample=demo.tokens_per_sample,
        console=console,
    )
    if process_group.rank() == 0:
        console.print(
            f"training {demo.description}: {num_params:,} parameters on {process_group.world_size()} ranks, "
            f"backend {process_group.backend()}, batch {plan.training.batch_size}",
            highlight=False,
        )
        events.subscribe(report.handle, events.StepEvent)
    return report


def _finish_report(report: TrainReport, demo: Demo, said: str | None, out: Path) -> None:
    curve = out / "loss.png"
    facts = {
        "model": demo.description,
        "world": f"{process_group.world_size()} ranks on {process_group.backend()}",
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
