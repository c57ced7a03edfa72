"""The server's end: accepts devices, asks them for updates, and looks at each reply by itself."""

from __future__ import annotations

import logging
import secrets
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torsh_distributed.comm.serialization import serialize
from torsh_distributed.comm.transport.frames import BadFrame
from torsh_distributed.errors import ConfigurationError, SerializationError, TorshError
from torsh_distributed.federated.client_selection import ClientFacts
from torsh_distributed.federated.deployment.connected_device import ConnectedDevice
from torsh_distributed.federated.deployment.device_heartbeat import HeartbeatSettings
from torsh_distributed.federated.deployment.device_links import LinkAdaptation
from torsh_distributed.federated.deployment.device_messages import (
    checked_head,
    joining_message,
    open_update,
    over_tls,
    update_message,
)
from torsh_distributed.federated.deployment.entry.device_listener import JOIN_S, DeviceListener
from torsh_distributed.federated.deployment.identity.device_identity import (
    DeviceKey,
    EnrolmentToken,
    server_context,
)
from torsh_distributed.federated.deployment.identity.enrolment import DeviceList
from torsh_distributed.federated.deployment.open_work import BufferedWork, SharedRound
from torsh_distributed.federated.deployment.secure_round import SumStep, secure_round
from torsh_distributed.federated.federated_config import FederatedConfig
from torsh_distributed.federated.local_training import ClientUpdate
from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
from torsh_distributed.federated.privacy.secure_sum.sum_collector import SumCollector
from torsh_distributed.federated.privacy.secure_sum.sum_roster import SumContext
from torsh_distributed.federated.rounds.round_order import HandOut, RoundOrder, RoundReplies, UpdateIntake
from torsh_distributed.federated.signatures import is_signed_by

_log = logging.getLogger(__name__)


class RoundServer:
    """A cohort of devices (see `Cohort`). A context manager; its threads end with it."""

    def __init__(
        self,
        config: FederatedConfig,
        *,
        directory: Path,
        fingerprint: str,
        numel: int,
        host: str = "127.0.0.1",
        port: int = 0,
        deadline_s: float = 600.0,
        heartbeat: HeartbeatSettings | None = None,
        links: LinkAdaptation | None = None,
    ) -> None:
        """`deadline_s`: of a round, and of waiting for `min_clients` devices before one.

        `links`: None asks all devices, metered or not, for the same codec.
        """
        if links is not None and config.secure_aggregation is not None:
            raise ConfigurationError(
                "links change single updates, which secure aggregation hides from the server",
                hint="leave one of the two out",
            )
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._config = config
        self._fingerprint = fingerprint
        self._most_bytes = 16 * numel + (1 << 16)
        self._deadline_s = deadline_s
        self._heartbeat = heartbeat or HeartbeatSettings()
        self._links = links or LinkAdaptation(slow_mbps=0, deadline_factor=None, uses_metered=True)
        context, self.digest = server_context(directory, DeviceKey.load_or_make(directory / "server.key"))
        self.devices = DeviceList(directory)
        self._changed = threading.Condition()
        self._connected: dict[str, ConnectedDevice] = {}
        self._facts: dict[str, ClientFacts] = {}
        self._open: SharedRound | BufferedWork | SumStep | None = None
        if config.buffer is not None:
            self._open = BufferedWork(deadline_s)
        self._counted: dict[str, bytes] = {}
        """Device to the nonce of its last update that is part of the model."""
        self._taken: dict[str, bytes] = {}
        """The same of the round that may count."""
        self._listener = DeviceListener((host, port), context, self._serve)
        self.address = self._listener.address
        self._listener.begin()

    def new_token(self) -> str:
        """For one device."""
        return EnrolmentToken(self.devices.add_token(), self.digest).text()

    def revoke(self, name: str) -> None:
        """Turn a device out, now and for good."""
        self.devices.revoke(name)
        with self._changed:
            device = self._connected.get(name)
        if device is not None:
            device.connection.cut()

    # For the round loop

    def clients(self) -> list[ClientFacts]:
        """Devices that are connected, once there are enough for a round or the deadline has come."""
        with self._changed:
            enough = self._config.min_clients
            self._changed.wait_for(lambda: len(self._askable()) >= enough, self._deadline_s)
            return [self._facts_of(name) for name in self._askable()]

    def _askable(self) -> list[str]:
        """Devices that are connected, by a link that may be used."""
        return [name for name, one in sorted(self._connected.items()) if self._links.uses_metered or not one.is_metered]

    def members(self) -> list[ClientFacts]:
        """All enrolled devices."""
        with self._changed:
            return [self._facts_of(name) for name in self.devices.public_keys()]

    def train(self, order: RoundOrder, chosen: list[str]) -> RoundReplies:
        """Ask these devices; returns when all have answered or left, or at the deadline."""
        if order.secure is not None:
            return self._train_secretly(order, order.secure, serialize(order.message()), chosen)
        intake = UpdateIntake(self._config.strategy, order, self._config.max_update_norm)
        with self._changed:
            facts = [self._facts_of(name) for name in chosen]
            uploads = {one.client: self._links.upload_of(one, order.upload) for one in facts}
            deadline_s = self._links.deadline_s(facts, self._deadline_s)
        payloads = {method: serialize(replace(order, upload=method).message()) for method in set(uploads.values())}
        work = SharedRound(intake, uploads)
        self._taken = work.taken
        messages = {name: payloads[method] for name, method in uploads.items()}
        intake.replies.bytes_down = self._exchange(work, "work", messages, deadline_s)
        with self._changed:
            self._learn(intake.replies)
        return intake.replies

    def _train_secretly(
        self, order: RoundOrder, settings: SecureAggregation, payload: bytes, chosen: list[str]
    ) -> RoundReplies:
        context = SumContext(
            settings=settings,
            fingerprint=self._fingerprint,
            numel=order.model.numel(),
            round=order.round,
            attempt=order.attempt,
        )
        collector = SumCollector(context, self.devices.public_keys(), self._config.min_clients)
        replies = secure_round(collector, payload, chosen, self._exchange, self._deadline_s)
        with self._changed:
            for name in collector.delivered if replies.num_updates else ():
                self._facts_of(name).num_delivered += 1
        return replies

    def _exchange(self, work: SharedRound | SumStep, kind: str, messages: Mapping[str, bytes], timeout_s: float) -> int:
        """Send each device its message and wait until all have answered or left; returns the bytes sent."""
        with self._changed:
            self._open = work
            num_bytes = sum(len(payload) for name, payload in messages.items() if self._ask(name, kind, payload))
            self._changed.wait_for(lambda: not work.waiting, timeout_s)
            for name in work.waiting:
                self._fail(name, "it did not answer in time")
            self._open = None
            for device in self._connected.values():
                device.nonce = b""
        return num_bytes

    def collect(self, order: RoundOrder, wanted: int, hand_out: HandOut) -> RoundReplies:
        """Ask devices as they become idle; returns with enough updates, or when nobody is at work. See `Cohort`."""
        work, buffer = self._open, self._config.buffer
        assert isinstance(work, BufferedWork), "made with the config"
        assert buffer is not None, "the loop collects for a buffer only"
        payloads: dict[str, bytes] = {}
        replies = RoundReplies()
        with self._changed:
            while True:
                replies.merge(work.take_answers(self._config, buffer, order.round, wanted - replies.num_updates))
                self._counted.update(work.taken)
                if replies.num_updates >= wanted:
                    break
                idle = [self._facts_of(name) for name in self._askable() if name not in work.waiting]
                for name in hand_out(idle, len(work.waiting)):
                    own = replace(order, upload=self._links.upload_of(self._facts_of(name), order.upload))
                    if own.upload not in payloads:
                        payloads[own.upload] = serialize(own.message())
                    payload = payloads[own.upload]
                    work.begin(name, own)
                    replies.bytes_down += len(payload) * self._ask(name, "work", payload)
                left_s = work.expire()
                if not work.waiting and not work.has_answers():
                    break
                self._wait_for_change(work, left_s)
            self._learn(replies)
        return replies

    def _wait_for_change(self, work: BufferedWork, timeout_s: float) -> None:
        """Until a device has answered, come or gone."""
        there = set(self._connected)
        self._changed.wait_for(lambda: work.has_answers() or there != set(self._connected), timeout_s)

    def _learn(self, replies: RoundReplies) -> None:
        for name, measured in replies.measured.items():
            self._facts_of(name).delivered(*measured)

    def _ask(self, name: str, kind: str, payload: bytes) -> bool:
        """Send a device what it has to answer, with the lock held; whether it is there."""
        device = self._connected.get(name)
        if device is None:
            self._fail(name, "it is not connected")
            return False
        device.nonce = secrets.token_bytes(16)
        device.asked_s = time.monotonic()
        counted = [self._counted.get(name, b"")] if kind == "work" else []
        device.say([kind, device.nonce, *counted], payload)
        return True

    def _facts_of(self, name: str) -> ClientFacts:
        return self._facts.setdefault(name, ClientFacts(client=name))

    def round_counts(self, order: RoundOrder) -> None:
        """Its devices are told with their next work, which this server or one after a crash gives them."""
        self._counted.update(self._taken)

    def state(self) -> Mapping[str, object]:
        """What was counted and measured of devices."""
        return {"facts": [asdict(facts) for facts in self._facts.values()], "counted": self._counted}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._facts = {facts["client"]: ClientFacts(**facts) for facts in state["facts"]}
        self._counted = state["counted"]

    # Connections

    def _serve(self, sock: ssl.SSLSocket) -> None:
        """One connection, on a thread of its own."""
        device: ConnectedDevice | None = None
        reason = "its connection ended"
        try:
            sock.do_handshake()
            device = self._admit(sock)
            for head, payload in device.replies():
                self._take(device, head, payload)
        except SerializationError as error:
            raise BadFrame(error.message) from error
        except TimeoutError:
            if device is not None:
                reason = device.heartbeat.silence()
            raise
        finally:
            if device is not None:
                self._forget(device, reason)

    def _admit(self, sock: ssl.SSLSocket) -> ConnectedDevice:
        """Who proves that it is an enrolled device, with the model of this server; BadFrame if not.

        Only then are payloads taken from it, on a connection with their limit.
        """
        connection = over_tls(sock, 0, JOIN_S)
        nonce = secrets.token_bytes(32)
        connection.send(["hello", nonce])
        head, _ = connection.receive()
        name, public, secret, fingerprint, is_metered, signature = checked_head(
            head, str, bytes, bytes, str, bool, bytes
        )
        signed = joining_message(str(head[0]), nonce, self.digest, name, fingerprint)
        try:
            if not is_signed_by(public, signature, signed):
                raise ConfigurationError("the signature is not that of this key")
            if fingerprint != self._fingerprint:
                raise ConfigurationError("its task has another model than the server's")
            if head[0] == "enrol":
                self.devices.enrol(name, public, secret)
            if self.devices.key_of(name) != public:
                raise ConfigurationError(f"{name!r} is enrolled with another key")
        except TorshError as error:
            connection.send(["refused", error.message])
            raise BadFrame(error.message) from error
        connection.send(["welcome", self._heartbeat.beat_s, self._heartbeat.expire_s])
        self._listener.has_joined(sock)
        connection = over_tls(sock, self._most_bytes, JOIN_S)
        device = ConnectedDevice(name, public, connection, self._heartbeat, is_metered=is_metered)
        with self._changed:
            earlier = self._connected.get(name)
            self._connected[name] = device
            self._fail(name, "its connection ended")
            self._changed.notify_all()
        if earlier is not None:
            earlier.connection.cut()  # the device was started again before its end was noticed
        return device

    def _take(self, device: ConnectedDevice, head: Any, payload: memoryview) -> None:
        """A reply. One that does not answer the device's work, or that it did not sign, is refused by itself."""
        if isinstance(head, list) and head[:1] == ["failed"]:
            nonce, reason = checked_head(head, bytes, str)
            with self._changed:
                if self._is_awaited(device, nonce):
                    self._fail(device.name, reason[:200])
            return
        nonce, signature = checked_head(head, bytes, bytes)
        problem, answer = "it answers something else than it was asked", None
        if not is_signed_by(device.public, signature, update_message(nonce, payload)):
            problem = "its update is not signed by it"
        else:
            try:
                answer = bytes(payload) if head[0] == "sum" else open_update(payload)
            except SerializationError as error:
                problem = error.message
        with self._changed:
            if device.heartbeat.bytes_per_s is not None:
                self._facts_of(device.name).bytes_per_s = device.heartbeat.bytes_per_s
            if not self._is_awaited(device, nonce):
                _log.warning("%s sent an update that answers no work of this round; it is ignored", device.name)
                return
            work = self._open
            assert work is not None, "work is awaited in a round only"
            device.nonce = b""
            if isinstance(answer, ClientUpdate) and answer.client != device.name:
                problem, answer = f"its update says that it is of {answer.client!r}", None
            if isinstance(work, SumStep) and isinstance(answer, bytes):
                work.take(device.name, answer)
            elif not isinstance(work, SumStep) and isinstance(answer, ClientUpdate):
                self._facts_of(device.name).turn_s = time.monotonic() - device.asked_s
                work.take(device.name, nonce, answer, len(payload))
            else:
                self._fail(device.name, problem)
            self._changed.notify_all()

    def _is_awaited(self, device: ConnectedDevice, nonce: bytes) -> bool:
        return self._open is not None and device.name in self._open.waiting and nonce == device.nonce != b""

    def _fail(self, name: str, reason: str) -> None:
        """With the lock held."""
        if self._open is not None:
            self._open.fail(name, reason)
            self._changed.notify_all()

    def _forget(self, device: ConnectedDevice, reason: str) -> None:
        with self._changed:
            device.close()
            if self._connected.get(device.name) is device:
                del self._connected[device.name]
                self._fail(device.name, reason)
            self._changed.notify_all()

    def close(self, *, is_done: bool = False) -> None:
        """End all connections; `is_done` tells devices that the run is over, so they do not come again."""
        with self._changed:
            for device in self._connected.values() if is_done else ():
                device.say(["end"])
            if is_done:
                self._changed.wait_for(lambda: not self._connected, JOIN_S)
        self._listener.close()
