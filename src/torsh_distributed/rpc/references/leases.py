"""Who holds which object of this process, and until when. Pure: the clock is passed in.

Why leases: a holder that dies says nothing. It stops renewing, and what nobody holds any more is dropped.
"""

from __future__ import annotations


class LeaseTable:
    """For each reference the moment at which each of its holders is gone, unless it renews."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._until_s: dict[str, dict[str, float]] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def holders(self, reference: str) -> set[str]:
        """Who has it."""
        return set(self._until_s.get(reference, ()))

    def hold(self, reference: str, holder: str, now_s: float) -> None:
        """A holder has it from now on."""
        self._until_s.setdefault(reference, {})[holder] = now_s + self._lease_s

    def renew(self, references: list[str], holder: str, now_s: float) -> list[str]:
        """A holder still has these; returns those that are gone already."""
        for reference in references:
            if reference in self._until_s:
                self._until_s[reference][holder] = now_s + self._lease_s
        return [reference for reference in references if reference not in self._until_s]

    def release(self, reference: str, holder: str) -> bool:
        """A holder gives it up; whether that was the last one."""
        holders = self._until_s.get(reference)
        if holders is None:
            return False
        holders.pop(holder, None)
        if holders:
            return False
        del self._until_s[reference]
        return True

    def expired(self, now_s: float) -> list[str]:
        """The references that nobody holds any more; they are forgotten here."""
        gone = []
        for reference, holders in list(self._until_s.items()):
            for holder in [holder for holder, until_s in holders.items() if until_s <= now_s]:
                del holders[holder]
            if not holders:
                del self._until_s[reference]
                gone.append(reference)
        return gone
