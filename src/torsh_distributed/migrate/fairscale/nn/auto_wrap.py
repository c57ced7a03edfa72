"""FairScale's `enable_wrap`, `wrap` and `auto_wrap`: which modules of a model are wrapped, and with what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from torsh_distributed.errors import InvalidArgument


class WrapPolicy(Protocol):
    """Says whether to look inside a module (`recurse`), or whether to wrap it."""

    def __call__(self, module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
        """`unwrapped_params`: elements in the module that no child has been wrapped with."""


@dataclass(frozen=True)
class _Context:
    """What `enable_wrap` was given."""

    wrapper_cls: Callable[..., nn.Module]
    policy: WrapPolicy
    kwargs: dict[str, Any] = field(default_factory=dict)
    moves_to_cuda_half: bool = False


_context: ContextVar[_Context | None] = ContextVar("fairscale_wrap", default=None)

EXCLUDED: frozenset[type[nn.Module]] = frozenset({nn.ModuleList, nn.ModuleDict})
"""Modules without a forward of their own: their children are wrapped, not they."""
LEAVES: frozenset[type[nn.Module]] = frozenset({nn.MultiheadAttention})
"""Modules that read the parameters of their children, which must stay in one piece with them."""


def default_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    module_is_root: bool,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
    skip_params_check_for_root: bool = False,
) -> bool:
    """Wrap modules with `min_num_params` parameters that no child has been wrapped with; look inside such modules."""
    is_large = unwrapped_params >= min_num_params
    if recurse:
        leaves = LEAVES if force_leaf_modules is None else force_leaf_modules
        return is_large and not isinstance(module, tuple(leaves))
    excluded = EXCLUDED if exclude_wrap_modules is None else exclude_wrap_modules
    is_wanted = is_large or (module_is_root and skip_params_check_for_root)
    return is_wanted and not isinstance(module, tuple(excluded))


# FairScale's scripts read these from the function.
default_auto_wrap_policy.EXCLUDE_WRAP_MODULES = set(EXCLUDED)  # type: ignore[attr-defined]  # as FairScale does
default_auto_wrap_policy.FORCE_LEAF_MODULES = set(LEAVES)  # type: ignore[attr-defined]  # as FairScale does


def config_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, module_is_root: bool) -> bool:
    """Look inside every module, and wrap those with a `wrapper_config`."""
    return recurse or hasattr(module, "wrapper_config")


@contextmanager
def enable_wrap(auto_wrap_policy: WrapPolicy | None = None, **wrapper_kwargs: Any) -> Iterator[None]:
    """Inside, `wrap` and `auto_wrap` wrap with `wrapper_cls` and the other arguments; outside they do nothing."""
    if _context.get() is not None:
        raise NotImplementedError(
            "enable_wrap() inside another enable_wrap() is not supported; leave the inner one out"
        )
    wrapper_cls = wrapper_kwargs.pop("wrapper_cls", None)
    if wrapper_cls is None:
        raise InvalidArgument(
            "enable_wrap needs wrapper_cls", hint="enable_wrap(wrapper_cls=FullyShardedDataParallel, …)"
        )
    moves = bool(wrapper_kwargs.pop("move_module_cuda_half", False))
    policy = auto_wrap_policy or default_auto_wrap_policy
    token = _context.set(_Context(wrapper_cls, policy, wrapper_kwargs, moves))
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """The module, wrapped if inside `enable_wrap`. A module's own `wrapper_config` wins over the context's arguments,
    and `wrap_overrides` over both."""
    context = _context.get()
    if context is None:
        return module
    own: dict[str, Any] = getattr(module, "wrapper_config", {})
    if context.moves_to_cuda_half:
        module = module.cuda().half()
    return context.wrapper_cls(module, **{**context.kwargs, **own, **wrap_overrides})


def auto_wrap(module: nn.Module, auto_wrap_policy: WrapPolicy | None = None, **kwargs: Any) -> nn.Module:
    """The module with the parts inside it wrapped that the policy names, and itself if it does; inside `enable_wrap`.

    Children are replaced in place. Nothing inside may be wrapped already: sizes would be counted twice.
    """
    context = _context.get()
    if context is None:
        return module
    wrapper = context.wrapper_cls
    if isinstance(wrapper, type):
        for name, inner in module.named_modules():
            if isinstance(inner, wrapper):
                raise InvalidArgument(
                    f"auto_wrap found {name or 'the module'} wrapped already",
                    hint="call auto_wrap once, or name the modules by `wrapper_config` and config_auto_wrap_policy",
                )
    return _wrapped(module, auto_wrap_policy or context.policy, kwargs, is_root=True)[0]


def _wrapped(module: nn.Module, policy: WrapPolicy, kwargs: dict[str, Any], *, is_root: bool) -> tuple[nn.Module, int]:
    """The module or its wrapper, and how many of its parameters are wrapped then."""
    total = sum(param.numel() for param in module.parameters())
    if not policy(module=module, recurse=True, unwrapped_params=total, module_is_root=is_root):
        return module, 0
    num_wrapped = 0
    for name, child in module.named_children():
        new, count = _wrapped(child, policy, kwargs, is_root=False)
        setattr(module, name, new)
        num_wrapped += count
    if policy(module=module, recurse=False, unwrapped_params=total - num_wrapped, module_is_root=is_root):
        return wrap(module, **kwargs), total
    return module, num_wrapped
