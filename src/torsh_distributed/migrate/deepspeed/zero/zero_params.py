"""What scripts find on a sharded parameter: DeepSpeed's marks, and the whole values while it is gathered.

Many scripts save a model parameter by parameter: those with `ds_id` are read inside `GatheredParameters`, from the very
object they hold. So a gathered parameter stays that object, and everything done to it is done to its whole values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ZeroParamStatus(Enum):
    """Where the values of a sharded parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is kept."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def mark_sharded(param: Any) -> None:
    """Give a sharded parameter what DeepSpeed's have; one that every rank holds whole gets nothing. Any: attributes."""
    if not hasattr(param, "to_local") or hasattr(param, "ds_id"):
        return
    param.ds_id = id(param)
    param.ds_shape, param.ds_numel = param.shape, param.numel()
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    param.ds_param_type = ZeroParamType.PARTITIONED


def make_whole(param: Any, gathered: nn.Parameter) -> None:
    """Until `make_sharded`, whatever is done to `param` is done to `gathered`. Any: a DTensor, as its class changes."""
    param.ds_whole = gathered
    param.ds_status = ZeroParamStatus.AVAILABLE
    param.__class__ = _whole_kind()


def make_sharded(param: Any) -> None:
    """The parameter is its shard again."""
    from torch.distributed.tensor import DTensor

    param.__class__ = DTensor
    param.ds_status = ZeroParamStatus.NOT_AVAILABLE
    del param.ds_whole


@functools.cache
def _whole_kind() -> type[DTensor]:
    """Made on first use: importing DTensor takes a second that many jobs need not spend."""
    from torch.distributed.tensor import DTensor

    class GatheredParam(DTensor):
        """A sharded parameter whose whole values are at hand."""

        __slots__ = ()

        @classmethod
        @override
        def __torch_function__(
            cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            return func(*_with_whole(args), **_with_whole(dict(kwargs or {})))

        @override
        def __repr__(self) -> str:  # type: ignore[override]  # torch's takes more
            return repr(self.ds_whole)  # type: ignore[attr-defined]  # set by make_whole

    return GatheredParam


def _with_whole(value: Any) -> Any:
    """The arguments of a call with whole parameters in the place of gathered ones."""
    if isinstance(value, Tensor):
        return getattr(value, "ds_whole", value)
    if isinstance(value, dict):
        return {name: _with_whole(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_whole(one) for one in value)
    return value
