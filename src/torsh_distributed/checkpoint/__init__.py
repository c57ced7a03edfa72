"""Training state on storage: verified, written in the background, loaded under any plan.

Read `checkpoint_manager`; `files` is the format, `saving` how it is written, `loading` how it is read, `save_policy`
when and what is kept.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
