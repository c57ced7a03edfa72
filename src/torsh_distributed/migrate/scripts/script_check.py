"""What a script asks of other libraries for distributed training, and our counterpart of each call; nothing is run.

Reads the syntax tree. A name is followed to where it was imported from, under whatever name, so `hvd.allreduce` and
`from torch.nn.parallel import DistributedDataParallel as DDP` are both found, and methods of what such a call returned.
Imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torsh_distributed.migrate.plan_draft import PlanDraft
from torsh_distributed.migrate.pytorch.fsdp_keywords import FSDP1_KEYWORDS, FULLY_SHARD_KEYWORDS
from torsh_distributed.migrate.pytorch.hook_keywords import DDP_KEYWORDS, GROUP_KEYWORDS, PIPE_KEYWORDS, SCALER_KEYWORDS
from torsh_distributed.migrate.report import KeyVerdict, Verdict
from torsh_distributed.migrate.scripts.script_changes import ScriptNames, parsed

COUNTERPARTS: dict[str, tuple[str, str]] = {
    "torch.distributed.init_process_group": ("td.init()", "finds its place under any launcher; picks the backend"),
    "torch.distributed.destroy_process_group": ("td.destroy_process_group()", "also called at exit"),
    "torch.nn.parallel.DistributedDataParallel": (
        "td.DistributedDataParallel(model)",
        "the same class, with compression and checks; or td.parallelize(model, optimizer, plan)",
    ),
    "torch.nn.DataParallel": ("td.DistributedDataParallel(model)", "one process for each device, started by torsh run"),
    "torch.distributed.fsdp.FullyShardedDataParallel": (
        "td.FullyShardedDataParallel(model)",
        "on FSDP2; or a plan with [fsdp] for td.parallelize",
    ),
    "torch.distributed.fsdp.fully_shard": ("", "stays; a plan with [fsdp] for td.parallelize does this"),
    "torch.distributed.pipeline.sync.Pipe": (
        "td.PipelineParallel(model, …)",
        "torch no longer has it; [pipeline] of a plan, or `torsh run --as fairscale` for one process",
    ),
    "torch.distributed.optim.ZeroRedundancyOptimizer": (
        'fsdp.strategy = "shard_optimizer"',
        "in a plan for td.parallelize, with mesh.shard",
    ),
    "torch.amp.GradScaler": ('precision.dtype = "fp16"', "the Engine scales losses itself; stays in loops of your own"),
    "torch.utils.data.distributed.DistributedSampler": (
        "td.DistributedSampler(dataset)",
        "continues where a checkpoint stopped; the Engine's batches() need none",
    ),
    "torch.distributed.all_reduce": ("td.all_reduce(tensor)", 'the reduction is a word: op="sum"'),
    "torch.distributed.broadcast": ("td.broadcast(tensor, src)", "the same"),
    "torch.distributed.reduce": ("td.reduce(tensor, dst)", "the same"),
    "torch.distributed.all_gather": ("td.all_gather(tensor)", "returns the list"),
    "torch.distributed.all_gather_into_tensor": ("td.all_gather_single(tensor)", "returns the rows of all ranks"),
    "torch.distributed.reduce_scatter_tensor": ("td.reduce_scatter_single(tensor)", "returns this rank's rows"),
    "torch.distributed.all_gather_object": ("td.all_gather_object(value)", "plain values, without pickle"),
    "torch.distributed.broadcast_object_list": ("td.broadcast_object(value, src)", "plain values, without pickle"),
    "torch.distributed.barrier": ("td.barrier()", "names the missing ranks after the deadline"),
    "torch.distributed.get_rank": ("td.rank()", "the same"),
    "torch.distributed.get_world_size": ("td.world_size()", "the same"),
    "torch.distributed.is_initialized": ("td.is_initialized()", "the same"),
    "torch.multiprocessing.spawn": ("td.spawn(function, nprocs)", "results come back, failures say why"),
    "torch.distributed.checkpoint.save": ("engine.save(path)", "or td.CheckpointManager"),
    "torch.distributed.checkpoint.load": ("engine.load(path)", "or td.CheckpointManager; any world size"),
    "accelerate.Accelerator": ("td.init() before it", "then it stays, on our backend; or td.parallelize with a plan"),
    "accelerate.PartialState": ("td.init() before it", "then it stays, on our backend"),
    "accelerate.notebook_launcher": ("td.spawn(function, nprocs)", "results come back, failures say why"),
    "accelerate.FullyShardedDataParallelPlugin": ("[fsdp] of a plan", "torsh migrate reads Accelerate's YAML"),
    "accelerate.DeepSpeedPlugin": ("torsh run --as deepspeed", "or [fsdp] of a plan"),
    "transformers.TrainingArguments": ("td.init() before it", "then it stays, on our backend"),
    "transformers.Trainer": ("", "stays, on our backend, with td.init() before its arguments"),
    "lightning.pytorch.Trainer": (
        "strategy=TorshStrategy(plan=…)",
        "from torsh_distributed.integrations.lightning_trainer: a plan says how the model is spread",
    ),
    "lightning.fabric.Fabric": (
        "strategy=TorshFabricStrategy(plan=…)",
        "from torsh_distributed.integrations.lightning_fabric: a plan says how the model is spread",
    ),
}
"""Calls with a counterpart, by the name under which their library documents them."""

METHODS: dict[str, dict[str, tuple[str, str]]] = {
    "torch.nn.parallel.DistributedDataParallel": {
        "no_sync": ("", "the same under td.DistributedDataParallel"),
        "join": ("", "the same under td.DistributedDataParallel"),
        "register_comm_hook": (
            "compression= of td.DistributedDataParallel",
            "or [compress] of a plan; td.migrate.pytorch.from_torch(comm_hook=…) says what each hook is",
        ),
    },
    "torch.distributed.fsdp.FullyShardedDataParallel": {
        "no_sync": ("", "the same under td.FullyShardedDataParallel"),
        "clip_grad_norm_": ("model.clip_grad_norm(max_norm)", "the same"),
        "summon_full_params": ("engine.whole_weights(change=True)", "whole parameters on every rank"),
    },
    "accelerate.Accelerator": dict.fromkeys(
        (
            "prepare",
            "backward",
            "accumulate",
            "gather",
            "gather_for_metrics",
            "reduce",
            "clip_grad_norm_",
            "save_state",
            "load_state",
            "wait_for_everyone",
            "unwrap_model",
        ),
        ("", "stays"),
    ),
    "deepspeed.initialize": dict.fromkeys(
        ("backward", "step", "train_batch", "eval_batch", "save_checkpoint", "load_checkpoint"),
        ("", "runs unchanged under `torsh run --as deepspeed`"),
    ),
    "lightning.fabric.Fabric": dict.fromkeys(("setup", "backward", "launch", "all_reduce"), ("", "stays")),
    "lightning.pytorch.Trainer": dict.fromkeys(("fit", "validate", "test"), ("", "stays")),
}
"""Methods of what those calls return."""

LIBRARIES = {
    "horovod": "runs unchanged under `torsh run --as horovod`",
    "deepspeed": "runs unchanged under `torsh run --as deepspeed`",
    "fairscale": "runs unchanged under `torsh run --as fairscale`",
}
"""Libraries that are stood in for."""

NOT_HERE = {
    "fairscale.nn.model_parallel.random": "not part of --as fairscale: seed ranks with torch.manual_seed",
    "fairscale.nn.MOELayer": "not part of --as fairscale: td.MoELayer",
    "fairscale.experimental": "not part of --as fairscale",
    "horovod.tensorflow": "not part of --as horovod, which is for torch",
    "horovod.keras": "not part of --as horovod, which is for torch",
    "horovod.mxnet": "not part of --as horovod, which is for torch",
    "horovod.spark": "not part of --as horovod, which is for torch",
    "horovod.ray": "not part of --as horovod, which is for torch",
}
"""Their parts that are not."""


_TABLES = {
    "torch.nn.parallel.DistributedDataParallel": DDP_KEYWORDS,
    "torch.distributed.fsdp.FullyShardedDataParallel": FSDP1_KEYWORDS,
    "torch.distributed.fsdp.fully_shard": FULLY_SHARD_KEYWORDS,
    "torch.distributed.init_process_group": GROUP_KEYWORDS,
    "torch.distributed.pipeline.sync.Pipe": PIPE_KEYWORDS,
    "torch.amp.GradScaler": SCALER_KEYWORDS,
}


def keyword_verdicts(full: str, call: ast.Call) -> tuple[KeyVerdict, ...]:
    """The verdicts on the keywords of a call of torch's; a value that is not written out is shown as its text."""
    table = _TABLES.get(full)
    if table is None:
        return ()
    draft = PlanDraft("pytorch")
    if full.startswith("torch.distributed.fsdp."):
        draft.put("mesh.shard", -1)
    found: list[KeyVerdict] = []
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in ("module", "self"):
            continue
        text = ast.unparse(keyword.value)
        if keyword.arg not in table:
            found.append(KeyVerdict(keyword.arg, text, Verdict.REFUSED, "", "torch has no such keyword"))
            continue
        try:
            table[keyword.arg](draft, keyword.arg, _value(keyword.value))
        except (TypeError, ValueError, AttributeError):
            found.append(KeyVerdict(keyword.arg, text, Verdict.HINT, "", "it depends on the value at run time"))
    return (*found, *draft.verdicts())


def _value(node: ast.expr) -> Any:
    """A literal as it is, `CPUOffload(offload_params=True)` as a table, and other expressions as their text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Call) and not node.args and node.keywords:
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return ast.unparse(node)


_AS_TORCH = "runs unchanged under `torsh run`, on our backends"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCall:
    """A call that matters for distributed training."""

    line: int
    call: str
    """The full name of what is called."""
    counterpart: str
    """What to write instead; empty if it stays."""
    note: str
    """What it means here."""
    keywords: tuple[KeyVerdict, ...] = ()
    """What becomes of its keywords, for calls of torch's."""


def check_script(source: str, name: str = "script.py") -> list[FoundCall]:
    """The distributed calls in a script, in order: of torch, Accelerate, Lightning, Horovod, DeepSpeed, FairScale.

    Raises InvalidArgument if it does not parse.
    """
    tree = parsed(source, name)
    names = ScriptNames(tree)
    found: list[FoundCall] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            full = names.full_name(node.func)
            if full is not None:
                found += _described(node, full)
            method = names.method(node.func)
            if method is not None:
                found += _described_method(node.lineno, *method)
    return sorted(found, key=lambda one: one.line)


def _described(node: ast.Call, full: str) -> Iterator[FoundCall]:
    line = node.lineno
    missing = next((note for part, note in NOT_HERE.items() if full == part or full.startswith(f"{part}.")), None)
    library = full.partition(".")[0]
    if missing is not None:
        yield FoundCall(line=line, call=full, counterpart="", note=missing)
    elif library in LIBRARIES:
        yield FoundCall(line=line, call=full, counterpart="", note=LIBRARIES[library])
    elif full in COUNTERPARTS:
        counterpart, note = COUNTERPARTS[full]
        keywords = keyword_verdicts(full, node)
        yield FoundCall(line=line, call=full, counterpart=counterpart, note=note, keywords=keywords)
    elif full.startswith(("torch.distributed.", "torch.nn.parallel.")):
        yield FoundCall(line=line, call=full, counterpart="", note=_AS_TORCH)


def _described_method(line: int, made_by: str, method: str) -> Iterator[FoundCall]:
    known = METHODS.get(made_by, {}).get(method)
    if known is not None:
        counterpart, note = known
        yield FoundCall(line=line, call=f"{made_by}.{method}", counterpart=counterpart, note=note)
    elif made_by.startswith("horovod.") and method in ("synchronize", "skip_synchronize"):
        yield FoundCall(line=line, call=f"{made_by}.{method}", counterpart="", note=LIBRARIES["horovod"])
