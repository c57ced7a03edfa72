"""What becomes of the keywords in a call, as far as they are written out: a verdict on each."""

from __future__ import annotations

import ast
from typing import Any

from torsh_distributed.migrate.plan_draft import PlanDraft
from torsh_distributed.migrate.pytorch.ddp_keywords import DDP_KEYWORDS
from torsh_distributed.migrate.pytorch.fsdp_keywords import FSDP1_KEYWORDS, FULLY_SHARD_KEYWORDS
from torsh_distributed.migrate.pytorch.hook_keywords import GROUP_KEYWORDS, PIPE_KEYWORDS, SCALER_KEYWORDS
from torsh_distributed.migrate.report import KeyVerdict, Verdict

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
    return (*found, *draft.entries)


def _value(node: ast.expr) -> Any:
    """A literal as it is, `CPUOffload(offload_params=True)` as a table, and other expressions as their text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        pass
    if isinstance(node, ast.Call) and not node.args and node.keywords:
        return {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return ast.unparse(node)
