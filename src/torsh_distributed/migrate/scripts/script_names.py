"""What a name in a script means: where it was imported from, or what it was assigned from. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torsh_distributed.errors import InvalidArgument

_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.utils.data.DistributedSampler": "torch.utils.data.distributed.DistributedSampler",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "torch.distributed.fsdp.FullyShardedDataParallel"
    ),
    "torch.distributed.distributed_c10d.init_process_group": "torch.distributed.init_process_group",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "accelerate.accelerator.Accelerator": "accelerate.Accelerator",
    "pytorch_lightning.Trainer": "lightning.pytorch.Trainer",
    "lightning.Trainer": "lightning.pytorch.Trainer",
    "lightning.pytorch.trainer.Trainer": "lightning.pytorch.Trainer",
    "lightning.Fabric": "lightning.fabric.Fabric",
    "lightning_fabric.Fabric": "lightning.fabric.Fabric",
}
"""Further names of one thing."""


def parsed(source: str, name: str) -> ast.Module:
    """The syntax tree of a script. Raises InvalidArgument if it has none."""
    try:
        return ast.parse(source, name)
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument("the script is not Python", script=name, reason=str(error)) from error


class ScriptNames:
    """The imports of a script, and names assigned from calls: `model = DDP(…)` makes `model.no_sync` known."""

    def __init__(self, tree: ast.Module) -> None:
        self._imported = dict(_imports(tree))
        self._made: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                full = self.full_name(node.value.func)
                if full is not None:
                    self._made.update(dict.fromkeys(_first_names(node.targets), full))
            elif isinstance(node, ast.With):
                for item in node.items:
                    full = self.full_name(item.context_expr.func) if isinstance(item.context_expr, ast.Call) else None
                    if full is not None and isinstance(item.optional_vars, ast.Name):
                        self._made[item.optional_vars.id] = full

    def full_name(self, node: ast.expr) -> str | None:
        """The name under which its library documents what `node` names; None if it was not imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._imported:
            return None
        full = ".".join([self._imported[node.id], *reversed(parts)])
        return _SAME.get(full, full)

    def method(self, node: ast.expr) -> tuple[str, str] | None:
        """What made the object, and the method called on it: (`accelerate.Accelerator`, `prepare`)."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._made:
            return self._made[node.value.id], node.attr
        return None


def _first_names(targets: list[ast.expr]) -> Iterator[str]:
    """Of `a, b = call()` the first: `deepspeed.initialize` returns its engine there."""
    for target in targets:
        inner = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
        if isinstance(inner, ast.Name):
            yield inner.id


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names in the script, and what each was imported as."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (top, top) if alias.asname is None else (alias.asname, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
