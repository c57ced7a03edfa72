"""What a server offers to workers and followers, by remote calls. Every push is in the parameters exactly once.

A push has a worker, its incarnation and a sequence number. That it was applied is part of the same record as the
parameters; only then it is answered. So a worker that gets no answer sends it again, to this process or to the next
one, and is answered from the record if it was applied.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.errors import BackendNotInitialized, InvalidArgument, TorshError
from torsh_distributed.rpc.parameters.absence_timers import AbsenceTimers
from torsh_distributed.rpc.parameters.kept_tensors import KeptTensors
from torsh_distributed.rpc.parameters.packed_tensors import Packed, check_codec, pack_values, packed_bytes, unpack
from torsh_distributed.rpc.parameters.publications import Publications
from torsh_distributed.rpc.parameters.push_rounds import Consistency, Rounds
from torsh_distributed.rpc.parameters.server_stats import ServerCounts, ServerStats
from torsh_distributed.rpc.parameters.shard import Gradients, ParameterShard, RowTable, mean_of
from torsh_distributed.rpc.serving.exposed import expose
from torsh_distributed.rpc.serving.served_call import current_call

_log = logging.getLogger(__name__)


@dataclass
class _Waiting:
    """A push that waits for those of the other workers."""

    gradients: Gradients
    weight: float
    base: int | None
    answers: list[Future[int]] = field(default_factory=list)


@expose
class ParameterService:
    """One server's part of the parameters. Any thread."""

    def __init__(self, keep: Path | None = None, *, lost_after_s: float = 10.0) -> None:
        self._kept = KeptTensors(keep)
        self._lock = threading.Lock()
        self._shard: ParameterShard | None = None
        self._rounds = Rounds(Consistency(), {})
        self._waiting: dict[str, _Waiting] = {}
        self._ahead: list[tuple[str, Future[int]]] = []
        self._publications = Publications(self._kept)
        self._settled: list[tuple[Future[Any], Any]] = []
        self._snapshots: dict[str | None, tuple[int, dict[str, Packed]]] = {}
        self._absences = AbsenceTimers(lost_after_s, self._lose)
        self._ends: list[Future[None]] = []
        self._counts = ServerCounts()
        if "spec" in self._kept.values:
            self._load()

    def _load(self) -> None:
        spec = self._kept.values["spec"]
        self._shard = ParameterShard(self._kept, spec["optimizer"], spec["options"], spec["tables"])
        self._rounds = Rounds.from_record(self._kept.values["rounds"])
        for worker in self._rounds.here:  # those that trained with the process before this one
            self._absences.expect(worker)

    @property
    def _version(self) -> int:
        return int(self._kept.values.get("version", 0))

    def _ready(self) -> ParameterShard:
        if self._shard is None:
            raise BackendNotInitialized("this server has no parameters yet", hint="call ParameterClient.create first")
        return self._shard

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One at a time; who is to be answered is answered afterwards, since that may wait for the network."""
        with self._lock:
            try:
                yield
            finally:
                settled, self._settled = self._settled, []
        for answer, value in settled:
            with contextlib.suppress(InvalidStateError):  # the caller is gone
                if isinstance(value, BaseException):
                    answer.set_exception(value)
                else:
                    answer.set_result(value)

    # Parameters

    def create(
        self,
        tensors: dict[str, Tensor],
        tables: dict[str, RowTable],
        optimizer: str,
        options: dict[str, Any],
        consistency: Consistency,
        place: list[int],
    ) -> None:
        """Begin with these parameters; every worker may ask, and all must ask for the same. `place`: which server of
        how many, for the rows of tables."""
        spec = {
            "optimizer": optimizer,
            "options": {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()},
            "tables": list(tables),
            "place": place,
            "shapes": {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
            | {name: [table.num_rows, table.dim, table.std, table.seed] for name, table in tables.items()},
        }
        with self._changing():
            if self._shard is not None:
                if self._kept.values["spec"] != spec or self._rounds.consistency != consistency:
                    raise InvalidArgument(
                        "the server has other parameters, another optimizer or another consistency already",
                        hint="every worker creates the same; join() takes what is there",
                        there=str({**self._kept.values["spec"], "consistency": self._rounds.consistency})[:600],
                    )
                return
            with self._kept.changing([]):
                for name, tensor in tensors.items():
                    self._kept.add(f"p/{name}", tensor.shape, tensor.dtype).copy_(tensor)
                for name, table in tables.items():
                    self._fill(name, table, *place)
                shard = ParameterShard(self._kept, optimizer, options, list(tables))
                rounds = Rounds(consistency, {})
                self._kept.commit(spec=spec, version=0, rounds=rounds.to_record())
            self._shard, self._rounds = shard, rounds

    def _fill(self, name: str, table: RowTable, index: int, num_servers: int) -> None:
        num_rows = (table.num_rows - index + num_servers - 1) // num_servers
        generator = torch.Generator().manual_seed(table.seed * num_servers + index)
        self._kept.add(f"p/{name}", (num_rows, table.dim), torch.float32).normal_(0, table.std, generator=generator)

    def describe(self) -> dict[str, Any]:
        """The names and kinds of the parameters here, the consistency, and the newest publication."""
        with self._lock:
            self._ready()
            return {"spec": self._kept.values["spec"], "publication": self._publications.newest}

    def set_options(self, options: dict[str, Any]) -> None:
        """Change the optimizer's options, such as `lr`, from the next step on."""
        with self._changing():
            self._ready()
            spec = self._kept.values["spec"]
            fresh = {**spec, "options": {**spec["options"], **options}}
            shard = ParameterShard(self._kept, fresh["optimizer"], fresh["options"], fresh["tables"])
            self._kept.commit(spec=fresh)
            self._shard = shard

    # Workers

    def join(self, worker: str) -> dict[str, int]:
        """Train from now on. What an earlier process of this name pushed and was not applied is dropped."""
        with self._changing():
            self._ready()
            rounds = self._rounds.joined(worker)
            self._drop_waiting(worker, "another process joined under this worker's name")
            self._keep(rounds)
            self._absences.expect(worker)
            self._go_on()
            member = rounds.member(worker)
            return {"incarnation": member.incarnation, "sequence": member.sequence}

    def presence(self, worker: str, incarnation: int) -> Future[None]:
        """Is never answered: when the worker's connection ends, it is lost unless it comes back in time."""
        call = current_call()
        assert call is not None, "it is not inline"
        with self._changing():
            member = self._rounds.member(worker)
            if not member.is_here or member.incarnation != incarnation:
                raise InvalidArgument("this worker does not belong to those that train", worker=worker)
            token = self._absences.present(worker)
        call.on_cancel(lambda: self._absences.absent(worker, token))
        return Future()

    def leave(self, worker: str, incarnation: int) -> None:
        """Train no longer: nobody waits for this worker."""
        with self._changing():
            if self._rounds.member(worker).incarnation == incarnation:
                self._remove(worker)

    def _lose(self, worker: str) -> None:
        """On a timer's thread: the worker did not come back in time."""
        with self._changing():
            if self._absences.is_due(worker):
                _log.warning("worker %s is gone; the others go on without it", worker)
                self._remove(worker)

    def _remove(self, worker: str) -> None:
        self._absences.forget(worker)
        if self._rounds.member(worker).is_here:
            self._drop_waiting(worker, "the worker has left")
            self._keep(self._rounds.left(worker))
            self._go_on()

    def _drop_waiting(self, worker: str, reason: str) -> None:
        waiting = self._waiting.pop(worker, None)
        for answer in [] if waiting is None else waiting.answers:
            self._settled.append((answer, InvalidArgument(f"the push was dropped: {reason}", worker=worker)))

    def _keep(self, rounds: Rounds) -> None:
        self._kept.commit(rounds=rounds.to_record())
        self._rounds = rounds

    # Pushes

    def push(
        self,
        worker: str,
        incarnation: int,
        sequence: int,
        base: int | None,
        weight: float,
        whole: dict[str, Packed],
        rows: dict[str, tuple[Tensor, Packed]],
    ) -> Future[int]:
        """Gradients of a worker; the answer is the version with them, when the consistency lets the worker go on."""
        gradients = Gradients(
            whole={name: unpack(packed) for name, packed in whole.items()},
            rows={name: (indices, unpack(packed)) for name, (indices, packed) in rows.items()},
        )
        answer: Future[int] = Future()
        num_bytes = packed_bytes([*whole.values(), *(packed for _, packed in rows.values())])
        with self._changing():
            shard, rounds = self._ready(), self._rounds
            self._counts.received_bytes += num_bytes
            try:
                is_repeated = rounds.is_repeated(worker, incarnation, sequence)
                if not is_repeated and worker not in self._waiting:
                    rounds.check_version(worker, base, self._version)
                    shard.check(gradients)
            except TorshError:
                self._counts.num_refused += 1
                raise
            self._counts.num_repeated += is_repeated
            if is_repeated:
                self._ahead.append((worker, answer))
            elif rounds.consistency.kind == "bsp":
                # A push that is sent again while it waits has the same gradients: only who is answered is new.
                self._waiting.setdefault(worker, _Waiting(gradients, weight, base)).answers.append(answer)
            else:
                self._apply({worker: base}, gradients)
                self._ahead.append((worker, answer))
            self._go_on()
        return answer

    def _go_on(self) -> None:
        """Take a step if all have pushed, and answer who waited for others."""
        here = self._rounds.here
        if here and self._rounds.has_begun and all(name in self._waiting for name in here):
            pushes = [self._waiting.pop(name) for name in here]
            answers = [(name, answer) for name, push in zip(here, pushes, strict=True) for answer in push.answers]
            try:
                bases = {name: push.base for name, push in zip(here, pushes, strict=True)}
                self._apply(bases, mean_of([(push.gradients, push.weight) for push in pushes]))
                self._ahead += answers
            except Exception as error:  # of the optimizer: every worker learns of it
                self._settled += [(answer, error) for _, answer in answers]
        waiting, self._ahead = self._ahead, []
        for worker, answer in waiting:
            if self._rounds.may_go_on(worker):
                self._counts.max_lead = max(self._counts.max_lead, self._rounds.lead(worker))
                self._settled.append((answer, self._rounds.member(worker).version))
            else:
                self._ahead.append((worker, answer))
        if not here:
            ends, self._ends = self._ends, []
            self._settled += [(end, None) for end in ends]

    def _apply(self, bases: dict[str, int | None], gradients: Gradients) -> None:
        """A step with the pushes of these workers, computed from these versions."""
        start_s = time.perf_counter()
        before = self._version
        rounds = self._rounds.applied(list(bases), before + 1)
        self._ready().apply(gradients, version=before + 1, rounds=rounds.to_record())
        self._rounds = rounds
        for base in bases.values():
            self._counts.applied(before, base)
        self._counts.apply_s += time.perf_counter() - start_s

    # Pulls

    def pull(self, names: list[str] | None, codec: str | None) -> tuple[int, dict[str, Packed]]:
        """Parameters as of one version. Workers that pull the same version share one copy."""
        check_codec(codec, values_only=True)
        with self._changing():
            shard, version = self._ready(), self._version
            self._counts.num_pulls += 1
            if codec not in self._snapshots or self._snapshots[codec][0] != version:
                copies = {name: pack_values(name, shard.tensor(name).clone(), codec, version) for name in shard.names}
                self._snapshots[codec] = (version, copies)
            found = self._snapshots[codec][1]
            for name in names or ():
                shard.tensor(name)
            wanted = found if names is None else {name: found[name] for name in names}
            self._counts.sent_bytes += packed_bytes(wanted.values())
        return version, wanted

    def pull_rows(self, wanted: dict[str, Tensor], codec: str | None) -> tuple[int, dict[str, Packed]]:
        """Rows of tables, by number."""
        check_codec(codec, values_only=True)
        with self._changing():
            shard, version = self._ready(), self._version
            self._counts.num_pulls += 1
            found = {}
            for name, rows in wanted.items():
                shard.check_rows(name, rows)
                found[name] = pack_values(name, shard.tensor(name).index_select(0, rows), codec, version)
            self._counts.sent_bytes += packed_bytes(found.values())
        return version, found

    # Followers

    def publish(self, number: int) -> int:
        """Keep a copy of the parameters for followers, as publication `number`; returns the newest."""
        with self._changing():
            shard = self._ready()
            if number > self._publications.newest:
                self._publications.add(number, {name: shard.tensor(name) for name in shard.names}, self._version)
                self._settled += self._publications.due()
            return self._publications.newest

    def follow(self, after: int) -> Future[dict[str, Any]]:
        """The first publication after this number that is still here, now or when there is one."""
        with self._changing():
            answer = self._publications.wait(after)
            self._settled += self._publications.due()
        return answer

    # The rest

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps for each parameter, as torch has it; without tables."""
        with self._lock:
            return self._ready().state()

    def restore(self, tensors: dict[str, Tensor], state: dict[str, dict[str, Any]]) -> int:
        """Go on from these parameters and this state of the optimizer, between pushes; returns the version."""
        with self._changing():
            for worker in list(self._waiting):
                self._drop_waiting(worker, "the server was given other parameters")
            self._ready().restore(tensors, state, version=self._version + 1)
            return self._version

    def end(self) -> Future[None]:
        """Is answered when no worker trains any more."""
        answer: Future[None] = Future()
        with self._changing():
            self._ends.append(answer)
            self._go_on()
        return answer

    def save(self, path: str) -> int:
        """Copy everything to a new directory of the server's node, to start a server from; returns the version."""
        with self._changing():
            self._ready()
            self._kept.save(Path(path))
            return self._version

    def stats(self) -> ServerStats:
        """As of now."""
        with self._lock:
            self._ready()
            counts = self._counts
            return ServerStats(
                version=self._version,
                num_parameters=sum(self._kept[name].numel() for name in self._kept.names("p/")),
                num_bytes=self._kept.num_bytes,
                workers=self._rounds.here,
                num_pushes=counts.num_pushes,
                num_repeated=counts.num_repeated,
                num_pulls=counts.num_pulls,
                num_refused=counts.num_refused,
                apply_s=counts.apply_s,
                publication=self._publications.newest,
                mean_staleness=counts.mean_staleness,
                max_staleness=counts.max_staleness,
                max_lead=counts.max_lead,
                received_bytes=counts.received_bytes,
                sent_bytes=counts.sent_bytes,
            )

    def _stop(self) -> None:
        """Before the end: nobody is lost any more."""
        self._absences.close()

    def _close(self) -> None:
        """Give back memory that is not to be kept."""
        with self._lock:
            self._kept.close()
