"""What torch's own flight recorder knows of gloo and nccl groups, in the form of our recorder's records.

torch records in C++, so it sees what has no Python frame too: the buckets of DDP in a backward pass. It is on under
`torsh run` (TORCH_FR_BUFFER_SIZE). Loaded by path before this package is imported: only the standard library.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

_C10D = "torch._C._distributed_c10d"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_MAX_ENTRIES = 256
_ENDED = ("completed",)
# By torch: the names that its groups give to what our recorder calls otherwise.
_NAMES = {
    "_allgather_base": "all_gather_single",
    "_all_gather_base": "all_gather_single",
    "all_gather_into_tensor": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_to_all": "all_to_all_single",
}
_ELEMENT_BYTES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2,
    "Short": 2,
}  # fmt: skip


class TorchRecord:
    """One operation of a group of torch's own, with the names of `OperationRecord`."""

    __slots__ = ("age_s", "group", "is_ended", "num_bytes", "op", "peer", "sequence")

    def __init__(self, entry: dict[str, Any]) -> None:
        group = entry.get("process_group")
        title = str(entry.get("profiling_name", ""))
        op = title.partition(":")[2] or title
        is_message = bool(entry.get("is_p2p"))
        self.group = str(group[0]) if isinstance(group, list) and group else str(entry.get("pg_name", ""))
        self.op = _NAMES.get(op.partition(" ")[0], op.partition(" ")[0])
        self.sequence = int(entry.get("p2p_seq_id" if is_message else "collective_seq_id") or 0)
        self.num_bytes = _num_bytes(entry)
        self.peer = _peer_of(op) if is_message else None
        self.is_ended = entry.get("state") in _ENDED or bool(entry.get("retired"))
        created_ns = entry.get("time_created_ns")
        self.age_s = max(0.0, time.time() - created_ns / 1e9) if isinstance(created_ns, int) else 0.0


def torch_records() -> list[TorchRecord]:
    """The latest operations of torch's gloo and nccl groups, oldest first; none if its recorder is off."""
    module = sys.modules.get(_C10D)
    found: list[TorchRecord] = []
    for name in _DUMPS:
        dump = getattr(module, name, None)
        if dump is not None:
            found += [TorchRecord(entry) for entry in _entries(dump)]
    return found


def _entries(dump: Any) -> Iterator[dict[str, Any]]:
    try:
        text = dump(includeCollectives=True, onlyActive=False)
        entries = json.loads(text).get("entries", [])
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another version of torch, or a recorder that is off
        return
    for entry in entries[-_MAX_ENTRIES:]:
        if isinstance(entry, dict):
            yield entry


def _num_bytes(entry: dict[str, Any]) -> int:
    sizes, dtypes = entry.get("output_sizes") or [], entry.get("output_dtypes") or []
    if not sizes:
        sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    return sum(math.prod(size) * _ELEMENT_BYTES.get(str(dtype), 1) for size, dtype in zip(sizes, dtypes, strict=False))


def _peer_of(op: str) -> int | None:
    """The other rank in `send 0->1` or `recv 0<-1`."""
    for arrow in ("->", "<-"):
        _, found, peer = op.partition(arrow)
        if found and peer.strip().isdigit():
            return int(peer)
    return None
