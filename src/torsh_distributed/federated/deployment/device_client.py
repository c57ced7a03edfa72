"""A device's end: enrols once, then trains on its own data whenever the server asks, until the run is over."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_distributed.comm.serialization import deserialize
from torsh_distributed.comm.transport.connection import Connection
from torsh_distributed.errors import (
    CommunicationError,
    ConfigurationError,
    InvalidArgument,
    SerializationError,
    TorshError,
    first_line,
)
from torsh_distributed.federated.deployment.device_heartbeat import DeviceHeartbeat, HeartbeatSettings
from torsh_distributed.federated.deployment.device_messages import (
    checked_head,
    joining_message,
    over_tls,
    pack_update,
    update_message,
)
from torsh_distributed.federated.deployment.entry.discovery import find_server
from torsh_distributed.federated.deployment.identity.device_identity import DeviceKey, EnrolmentToken, client_context
from torsh_distributed.federated.deployment.identity.known_peers import KnownPeers
from torsh_distributed.federated.federated_config import config_of
from torsh_distributed.federated.federated_task import FederatedTask
from torsh_distributed.federated.local_training import train_client
from torsh_distributed.federated.model_vector import ModelVector
from torsh_distributed.federated.privacy.client_privacy import LocalPrivacy
from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
from torsh_distributed.federated.privacy.secure_sum.sum_member import SumMember
from torsh_distributed.federated.privacy.secure_sum.sum_roster import SumContext
from torsh_distributed.federated.random_seeds import derived_seed, drawing_as_of
from torsh_distributed.federated.rounds.round_file import RoundFile
from torsh_distributed.federated.rounds.round_order import RoundOrder
from torsh_distributed.private_files import open_private

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_FIND_S = 3.0
"""Then it is looked for again: answers that are older than a server that has moved are forgotten."""
_MOST_OTHER_BYTES = 1 << 22
"""Of a message besides its vectors: the keys of all clients of a secure sum."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class DeviceClient:
    """One device. Its key and its server's certificate are in `directory`, so it joins again without a token."""

    def __init__(
        self,
        task: FederatedTask,
        address: tuple[str, int] | None,
        *,
        name: str,
        directory: Path,
        token: str | None = None,
        give_up_s: float = 60.0,
        secure_aggregation: SecureAggregation | None = None,
        peers: Mapping[str, bytes] | None = None,
        is_metered: Callable[[], bool] | None = None,
    ) -> None:
        """`address`: None finds the server on the local network, each time that the device joins.

        `give_up_s`: how long the server may be away before `run` ends with an error.

        `secure_aggregation`: None takes that of the task's config; with it the device sends masked updates only.
        `peers`: devices that may be in a sum with this one, by name and key; None knows each as it was first seen.
        `is_metered`: asked each time that the device joins whether its link is; None says that it is not.
        """
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._task = task
        self._address = address
        self._name = name
        self._give_up_s = give_up_s
        self._key = DeviceKey.load_or_make(directory / "device.key")
        self._server_file = directory / "server.digest"
        self._token = None if token is None else EnrolmentToken.parse(token)
        self._server_digest = self._known_server()
        self._config = config_of(task)
        with drawing_as_of(derived_seed(self._config.seed, "model")):  # as the server did
            self._replica = ModelVector(task.model())
        self._memory = ClientMemory(directory)
        self._secure = secure_aggregation or self._config.secure_aggregation
        self._peers = KnownPeers(directory, peers)
        self._is_metered = is_metered or (lambda: False)
        self._member: SumMember | None = None
        """Its part in the secure sum of the round."""
        self._data = task.device_data(name)
        self._ended = threading.Event()

    def _known_server(self) -> bytes:
        """The digest of the server's certificate: the token's, or that of the enrolment before."""
        if self._token is not None:
            return self._token.server_digest
        if not self._server_file.exists():
            raise InvalidArgument("this device is not enrolled", hint="join with --token, once")
        return self._server_file.read_bytes()

    def run(self) -> int:
        """Take part until the server ends the run; returns how many updates were sent. Comes again after a cut."""
        num_updates, pause_s = 0, _FIRST_PAUSE_S
        last_seen_s = time.monotonic()
        while True:
            try:
                heartbeat = self._join()
            except OSError as error:
                if isinstance(error, TorshError) and not isinstance(error, CommunicationError):
                    raise
                if time.monotonic() - last_seen_s > self._give_up_s:
                    raise CommunicationError(
                        f"the server cannot be reached: {first_line(error)}",
                        hint="check that it runs at this address; a device tries for give_up_s (--give-up-s)",
                        address=str(self._address or "discovered"),
                    ) from error
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            pause_s = _FIRST_PAUSE_S
            try:
                while (message := heartbeat.receive()) is not None and message[0] != ["end"]:
                    num_updates += self._answer(heartbeat, *message)
                return num_updates
            except OSError as error:
                _log.warning("the connection to the server ended: %s", first_line(error))
                last_seen_s = time.monotonic()
            finally:
                heartbeat.close()

    def _join(self) -> DeviceHeartbeat:
        """A connection to the server that this device was enrolled with. ConfigurationError if it refuses."""
        address = self._address or find_server(self._server_digest, _FIND_S)
        sock = socket.create_connection(address, timeout=_CONNECT_S)
        try:
            tls = client_context().wrap_socket(sock)
        except OSError:
            sock.close()
            raise
        shown = hashlib.sha256(tls.getpeercert(binary_form=True) or b"").digest()
        if shown != self._server_digest:
            tls.close()
            raise ConfigurationError(
                "this is not the server that the device was enrolled with: it shows another certificate",
                address=str(address),
            )
        connection = over_tls(tls, 16 * self._replica.numel + _MOST_OTHER_BYTES, _CONNECT_S)
        try:
            return DeviceHeartbeat(connection, self._introduce(connection))
        except BaseException:
            connection.close()
            raise

    def _introduce(self, connection: Connection) -> HeartbeatSettings:
        (nonce,) = checked_head(connection.receive()[0], bytes)
        kind = "join" if self._token is None else "enrol"
        secret = b"" if self._token is None else self._token.secret
        fingerprint = self._replica.fingerprint
        signature = self._key.sign(joining_message(kind, nonce, self._server_digest, self._name, fingerprint))
        connection.send([kind, self._name, self._key.public, secret, fingerprint, self._is_metered(), signature])
        head, _ = connection.receive()
        if isinstance(head, list) and head[:1] != ["welcome"]:
            (reason,) = checked_head(head, str)
            raise ConfigurationError(f"the server refused this device: {reason}", device=self._name)
        if self._token is not None:
            with os.fdopen(open_private(self._server_file, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                file.write(self._server_digest)
            self._token = None
        beat_s, expire_s = checked_head(head, float, float)
        return HeartbeatSettings(beat_s=beat_s, expire_s=expire_s)

    def _answer(self, heartbeat: DeviceHeartbeat, head: Any, payload: memoryview) -> int:
        """Do the work; how many updates were sent."""
        if isinstance(head, list) and head[:1] != ["work"]:
            return self._answer_step(heartbeat, head, bytes(payload))
        nonce, counted = checked_head(head, bytes, bytes)
        self._member = None
        try:
            order = RoundOrder.of_message(deserialize(bytes(payload)), self._replica.read())
            self._require_privacy(order)
            state = self._memory.state_after(counted) if order.keeps_state else {}
            work = order.work_of(self._name)
            if isinstance(self._config.privacy, LocalPrivacy):
                self._memory.count_private(self._config.privacy)  # before the update is there: a crash cannot undo it
            with heartbeat.beating():
                update, new_state = train_client(self._task, self._replica, order.model, self._data, work, state)
            if new_state:
                self._memory.remember(nonce, new_state)  # before the update: once sent, it may count
        except Exception as error:  # of the task's own code, or an order of another version
            heartbeat.send(["failed", nonce, f"{type(error).__name__}: {first_line(error)}"[:200]])
            return 0
        if order.secure is None:
            self._send(heartbeat, "update", nonce, pack_update(update))
            return 1
        context = SumContext(
            settings=order.secure,
            fingerprint=self._replica.fingerprint,
            numel=update.delta.numel(),
            round=order.round,
            attempt=order.attempt,
        )
        self._member = SumMember(
            context, update.delta, update.num_samples, name=self._name, signer=self._key, unknown=self._peers.unknown
        )
        self._send(heartbeat, "sum", nonce, self._member.keys())
        return 0

    def _answer_step(self, heartbeat: DeviceHeartbeat, head: list[Any], payload: bytes) -> int:
        """A step of a secure sum; how many updates were sent."""
        (nonce,) = checked_head(head, bytes)
        member, self._member = self._member, None
        try:
            if member is None:
                raise InvalidArgument("this device has no part in the sum that the server asks it about")
            answer = member.answer(str(head[0]), payload)
        except (ConfigurationError, InvalidArgument, SerializationError) as error:
            _log.warning("a step of a secure sum is refused: %s", error.message)
            heartbeat.send(["failed", nonce, error.message[:200]])
            return 0
        self._member = member
        self._send(heartbeat, "sum", nonce, answer)
        return int(head[0] == "sealed")

    def _send(self, heartbeat: DeviceHeartbeat, kind: str, nonce: bytes, payload: bytes) -> None:
        heartbeat.send([kind, nonce, self._key.sign(update_message(nonce, payload))], payload)

    def _require_privacy(self, order: RoundOrder) -> None:
        """Refuse work that would let the server see more than this device's own settings do."""
        if order.secure != self._secure:
            raise ConfigurationError(
                "the server asks for this device's update by itself, and it takes part in secure aggregation only"
                if order.secure is None
                else "the server's settings of secure aggregation are not those of this device",
                hint="give both ends the same secure_aggregation",
            )
        local = self._config.privacy
        if isinstance(local, LocalPrivacy) and (order.local_clip, order.local_noise_std) != (
            local.clip_norm,
            local.noise_std,
        ):
            raise ConfigurationError("the server asks for an update without the noise that this device adds")


class ClientMemory:
    """What a device remembers from round to round and never sends: SCAFFOLD's control variate, the privacy it spent.

    The state after the last update that counted, and the one that holds if the update after it counts, too.

    Why two: only the server knows which updates became part of the model, and says so with the next work.
    """

    def __init__(self, directory: Path) -> None:
        self._file = RoundFile(directory, "client.state").held()
        self._private = RoundFile(directory, "privacy.state")

    def state_after(self, counted: bytes) -> Mapping[str, Tensor]:
        """The state behind the update with this nonce; empty if none has counted."""
        if not counted:
            return {}
        for known in self._read():
            if known["nonce"] == counted:
                self._file.write({"states": [known]})
                state: dict[str, Tensor] = known["state"]
                return state
        raise InvalidArgument(
            "this device does not have what it remembered after its last update that counted",
            hint="restore its directory, or enrol it under another name",
        )

    def remember(self, nonce: bytes, state: Mapping[str, Tensor]) -> None:
        """`state` holds if the update with this nonce counts; on the disk when this returns."""
        self._file.write({"states": [*self._read()[:1], {"nonce": nonce, "state": dict(state)}]})

    def count_private(self, privacy: LocalPrivacy) -> None:
        """An update with this noise is about to leave the device. ConfigurationError if its budget is spent.

        The server counts, too; that it does so is nothing that a device may have to rely on.
        """
        noise = repr((privacy.clip_norm, privacy.noise_multiplier, privacy.delta))
        spent = self._private.read() or {"noise": noise, "num_updates": 0}
        if spent["noise"] != noise:
            raise ConfigurationError(
                "this device has sent updates with other noise, whose ε does not add up with that of these",
                hint="join from another directory: its budget is a new one",
            )
        if spent["num_updates"] >= privacy.most_rounds():
            raise ConfigurationError(f"this device has spent its budget of ε = {privacy.budget:g}")
        self._private.write({"noise": noise, "num_updates": spent["num_updates"] + 1})

    def _read(self) -> list[dict[str, Any]]:
        known = self._file.read()
        return [] if known is None else list(known["states"])
