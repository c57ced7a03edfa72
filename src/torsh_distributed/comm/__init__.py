"""Moving bytes between ranks: users call `groups` and `collectives`; `backends` carry the bytes.

Beside them: `store` and `meeting` (where ranks meet), `algorithms` and `scheduler` (how and when operations travel),
`measurement`, and `agreement`, `serialization` and `serial_thread`, on which the others build.
"""

from torsh_distributed.lazy import exports as _exports

__all__, __getattr__, __dir__ = _exports(__name__)
