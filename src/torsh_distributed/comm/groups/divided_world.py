"""torch's groups, seen as two: those that this library made for itself, and those that a script makes.

Why: a Horovod script has no process group of torch's, and libraries rely on it. Ignite, Lightning and torchmetrics ask
torch whether it is initialised; if it is, they average gradients and metrics over its group, or leave it to DDP, and
forget Horovod. So the group underneath is there for our own code only. torch keeps its groups in one object, which is
its extension point for this; who asks is the nearest caller outside torch.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from typing_extensions import override

from torsh_distributed.comm.torch_internals import _World, _world

_OURS = __name__.partition(".")[0]
_PASSED_THROUGH = frozenset({"torch", "contextlib", "functools"})
_MAPS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
_DIVIDED = frozenset({"default_pg", *_MAPS})

_of_script: dict[str, Any] = {}


def divide_world() -> None:
    """From now on scripts and other libraries see none of the groups that there are; a second call does nothing.

    What they make with `torch.distributed.init_process_group` afterwards is theirs, and is not seen here.
    """
    if not isinstance(_world, _DividedWorld):
        _of_script.update({name: {} for name in _MAPS}, default_pg=None)
        _world.__class__ = _DividedWorld


class _DividedWorld(_World):
    """Answers our own code with our groups, and everyone else with the script's. Both count their names together."""

    @override
    def __getattribute__(self, name: str) -> Any:
        if name in _DIVIDED and not _is_ours_asking():
            return _of_script[name]
        return super().__getattribute__(name)

    @override
    def __setattr__(self, name: str, value: object) -> None:
        if name in _DIVIDED and not _is_ours_asking():
            _of_script[name] = value
        else:
            super().__setattr__(name, value)


def _is_ours_asking() -> bool:
    """Whether the nearest caller outside torch is this library; a thread of torch's alone counts as the script's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _PASSED_THROUGH:
            return package == _OURS
        frame = frame.f_back
    return False
