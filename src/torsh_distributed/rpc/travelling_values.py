"""What may travel in calls beyond plain values: see `ValueRegistry`."""

from __future__ import annotations

from typing import Any

from torsh_distributed.rpc.references.held_references import HeldReferences
from torsh_distributed.rpc.references.rref import ReferenceHolder, RRef
from torsh_distributed.rpc.serving.exposed import TABLE


class TravellingValues:
    """What this process has registered or exposed, and references of its worker."""

    name_of_value = staticmethod(TABLE.name_of_value)
    value_class = staticmethod(TABLE.value_class)
    name_of_function = staticmethod(TABLE.name_of_function)
    function = staticmethod(TABLE.function)

    def __init__(self, worker: ReferenceHolder, held: HeldReferences) -> None:
        self._worker = worker
        self._held = held

    def pack_reference(self, value: Any) -> list[Any] | None:
        """A reference as plain values; None if it is not one."""
        if not isinstance(value, RRef):
            return None
        self._held.give(value)
        return [value.owner_name(), value.key]

    def open_reference(self, packed: list[Any]) -> RRef:
        """A reference that was given to us."""
        owner, key = packed
        return RRef.to(self._worker, str(owner), str(key))
