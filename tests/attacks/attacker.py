"""What a stranger tries. Runs alone, as another user, with the standard library: `python -I -S -c SOURCE < facts.json`.

It may know everything that can be known without the secret: addresses, ports, process ids, paths, the protocol. Every
attempt returns what it got: a text if something succeeded that should not, otherwise nothing. Whether the job was
changed, joined, ended or delayed is judged from the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import encodings.idna  # noqa: F401 - looked up by socket, and unreadable for the other user
import hashlib
import hmac
import json
import os
import resource
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
Attempt = Callable[[Facts], str | None]

STORE, LAUNCHER = b"TORSHKV2", b"TORSHLN3"
HELLO_BYTES, PROOF_BYTES = 41, 32
SET_STRANGER = b"f" + b"".join(struct.pack("!q", len(part)) + part for part in (b"set", b"stranger", b"1", b"9.0"))
COUNT = b"f" + b"".join(struct.pack("!q", len(part)) + part for part in (b"count", b""))
END_JOB = b'{"kind":"end","exit_code":9,"failure":null,"signal":9}'
PTRACE_ATTACH, PIDFD_GETFD, PROCESS_VM_READV = 16, 438, 310

ATTEMPTS: dict[str, dict[str, Attempt]] = {"port": {}, "user": {}}
"""By what they need: a port that can be reached, or an account on the machine."""


def attempt(needs: str, name: str) -> Callable[[Attempt], Attempt]:
    """Add a function to the list."""

    def add(function: Attempt) -> Attempt:
        ATTEMPTS[needs][name] = function
        return function

    return add


# Talking to a port


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def hello(magic: bytes, flag: bytes = b"\0") -> bytes:
    return magic + flag + secrets.token_bytes(32)


def connect(address: list[Any], timeout_s: float = 2.0) -> socket.socket:
    return socket.create_connection((address[0], address[1]), timeout=timeout_s)


def read_all(sock: socket.socket, timeout_s: float = 1.0) -> bytes:
    """What arrives until the other end closes or says nothing for a while."""
    sock.settimeout(timeout_s)
    data = b""
    with contextlib.suppress(OSError):
        while piece := sock.recv(65536):
            data += piece
    return data


def say(address: list[Any], *pieces: bytes) -> bytes:
    """Send the pieces and return everything that comes back."""
    with connect(address) as sock:
        with contextlib.suppress(OSError):
            for piece in pieces:
                sock.sendall(piece)
        return read_all(sock)


def beyond_hello(reply: bytes) -> str | None:
    """A server tells a stranger its hello and proof; anything more is an answer he should not get."""
    return f"{len(reply)} bytes: {reply[-40:]!r}" if len(reply) > HELLO_BYTES + PROOF_BYTES else None


def anything(reply: bytes) -> str | None:
    return f"{len(reply)} bytes: {reply[:40]!r}" if reply else None


def prove(secret: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    key = hmac.digest(secret, client_hello + server_hello, "sha256")
    return hmac.digest(key, b"proof of the client", "sha256")


def with_secret(address: list[Any], magic: bytes, secret: bytes, then: bytes) -> str | None:
    with connect(address) as sock:
        ours = hello(magic)
        sock.sendall(ours)
        theirs = sock.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        sock.sendall(prove(secret, ours, theirs[:HELLO_BYTES]) + then)
        return anything(read_all(sock))


def targets(facts: Facts) -> Iterator[tuple[list[Any], bytes, bytes]]:
    """Every server of the job with its magic word and what a stranger would ask it."""
    yield facts["store"], STORE, frame(COUNT) + frame(SET_STRANGER)
    if facts.get("launcher"):
        yield facts["launcher"], LAUNCHER, struct.pack("!IQ", len(END_JOB), 0) + END_JOB + bytes(32)


def everywhere(talk: Callable[[list[Any], bytes, bytes], str | None]) -> Attempt:
    """The attempt at every server of the job."""

    def run(facts: Facts) -> str | None:
        return next((found for target in targets(facts) if (found := talk(*target))), None)

    return run


@attempt("port", "a plain torch client asks for a key")
def plain_torch(facts: Facts) -> str | None:
    validate = b"\x00" + struct.pack("<I", 0x3C85F7CE)
    get = b"\x03" + struct.pack("<Q", 4) + b"init"
    return anything(say(facts["store"], validate, get))


for _name, _words in {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a Redis command": b"*2\r\n$4\r\nKEYS\r\n$1\r\n*\r\n",
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(193),
    "the protocol of an older version": b"TORSHKV1" + bytes(16) + bytes(32),
    "64 KiB of random bytes": b"\xff" + os.urandom(65535),
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "a single zero byte": b"\0",
}.items():
    ATTEMPTS["port"][_name] = everywhere(lambda address, magic, ask, words=_words: anything(say(address, words)))  # type: ignore[misc]

ATTEMPTS["port"]["a random proof, then requests"] = everywhere(
    lambda address, magic, ask: beyond_hello(say(address, hello(magic), os.urandom(32), ask))
)
ATTEMPTS["port"]["requests in place of a proof"] = everywhere(
    lambda address, magic, ask: beyond_hello(say(address, hello(magic), ask))
)
ATTEMPTS["port"]["requests before the hello"] = everywhere(
    lambda address, magic, ask: anything(say(address, ask, hello(magic)))
)
ATTEMPTS["port"]["the proof of an empty secret"] = everywhere(
    lambda address, magic, ask: with_secret(address, magic, b"", ask)
)
ATTEMPTS["port"]["an unknown flag in the hello"] = everywhere(
    lambda address, magic, ask: beyond_hello(say(address, hello(magic, b"\x07"), bytes(32), ask))
)
ATTEMPTS["port"]["a frame of 4 GiB announced before the proof"] = everywhere(
    lambda address, magic, ask: beyond_hello(say(address, hello(magic), struct.pack("!I", 2**32 - 1) * 16))
)
ATTEMPTS["port"]["a megabyte after the hello"] = everywhere(
    lambda address, magic, ask: beyond_hello(say(address, hello(magic), os.urandom(2**20)))
)


@attempt("port", "the proofs of secrets that could be guessed")
def guesses(facts: Facts) -> str | None:
    words = [
        *facts["guesses"],
        *(hashlib.sha256(f"torsh run {word}".encode()).hexdigest() for word in facts["guesses"]),
    ]
    for address, magic, ask in targets(facts):
        for word in words:
            if found := with_secret(address, magic, word.encode(), ask):
                return f"{word}: {found}"
    return None


def _reflect(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    with connect(address) as sock:
        sock.sendall(hello(magic))
        theirs = sock.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        sock.sendall(theirs[HELLO_BYTES:] + ask)
        return anything(read_all(sock))


def _parallel(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    """Send the server's own hello back to it on a second connection, as ours, and use its proof on the first."""
    with connect(address) as one, connect(address) as other:
        one.sendall(hello(magic))
        theirs = one.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        other.sendall(theirs[:HELLO_BYTES])
        answer = other.recv(HELLO_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
        one.sendall(answer[HELLO_BYTES:] + ask)
        return anything(read_all(one))


def _byte_by_byte(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    with connect(address) as sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in hello(magic) + bytes(31):
            sock.sendall(bytes([byte]))
        return beyond_hello(read_all(sock, 0.3))
    return None


def _idle(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    """200 connections that say nothing, 200 that stop within the hello."""
    opened = []
    with contextlib.suppress(OSError):
        for number in range(400):
            sock = connect(address)
            if number % 2:
                sock.sendall(magic[:4])
            opened.append(sock)
    time.sleep(0.3)
    for sock in opened:
        sock.close()
    return None


def _connect_and_leave(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            connect(address).close()
    return None


def _reset(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    for _ in range(200):
        with contextlib.suppress(OSError), connect(address) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(hello(magic))
    return None


def _half_closed(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    with connect(address) as sock:
        sock.sendall(hello(magic))
        sock.shutdown(socket.SHUT_WR)
        return beyond_hello(read_all(sock))


def _urgent(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    with connect(address) as sock, contextlib.suppress(OSError):
        for _ in range(20):
            sock.send(b"!", socket.MSG_OOB)
        sock.sendall(hello(magic) + bytes(32) + ask)
        return beyond_hello(read_all(sock))
    return None


def _cross(address: list[Any], magic: bytes, ask: bytes) -> str | None:
    """The magic word of one protocol at the server of the other."""
    other = LAUNCHER if magic == STORE else STORE
    return anything(say(address, hello(other), bytes(32), ask))


def _replay(facts: Facts) -> str | None:
    """What a member said on an earlier connection, word for word."""
    for address, magic, ask in targets(facts):
        recorded = facts["recorded"].get(magic.decode())
        if recorded and (found := beyond_hello(say(address, bytes.fromhex(recorded), ask))):
            return found
    return None


ATTEMPTS["port"].update(
    {
        "the server's proof sent back to it": everywhere(_reflect),
        "the server's hello sent back on a second connection": everywhere(_parallel),
        "a hello byte by byte, and a proof that never ends": everywhere(_byte_by_byte),
        "400 connections that say nothing": everywhere(_idle),
        "300 connections that leave at once": everywhere(_connect_and_leave),
        "200 connections that are reset": everywhere(_reset),
        "a hello and a half-closed connection": everywhere(_half_closed),
        "urgent data": everywhere(_urgent),
        "the hello of the other protocol": everywhere(_cross),
        "the recorded handshake of a member": _replay,
    }
)


@attempt("port", "garbage to every other port of the job")
def other_ports(facts: Facts) -> str | None:
    for address in facts["other_ports"]:
        with contextlib.suppress(OSError), connect(address) as sock:
            sock.sendall(os.urandom(512))
    return None


@attempt("port", "idle connections to every other port of the job")
def other_ports_idle(facts: Facts) -> str | None:
    opened = []
    for address in facts["other_ports"]:
        with contextlib.suppress(OSError):
            opened += [connect(address) for _ in range(20)]
    time.sleep(0.2)
    for sock in opened:
        sock.close()
    return None


@attempt("port", "the ports that are for this machine only, from outside")
def loopback_ports(facts: Facts) -> str | None:
    for address in facts["closed_ports"]:
        with contextlib.suppress(OSError):
            connect(address, 0.5).close()
            return f"{address} accepts connections"
    return None


# An account on the machine


def try_all(facts: Facts, action: Callable[[int], object]) -> str | None:
    """Do something to every process of the job; whatever works is reported."""
    for role, pid in facts["pids"]:
        try:
            result = action(pid)
        except OSError:
            continue
        if result:
            return f"{role}: {result!r:.80}"
    return None


for _file in ("environ", "mem", "maps", "auxv", "syscall", "stack", "pagemap", "smaps", "io"):

    def _read(facts: Facts, file: str = _file) -> str | None:
        return try_all(facts, lambda pid: Path(f"/proc/{pid}/{file}").read_bytes()[:80])

    if _file not in ("mem", "stack"):
        ATTEMPTS["user"][f"read /proc/PID/{_file}"] = _read


@attempt("user", "read the memory of a process in /proc/PID/mem")
def read_memory(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY))


@attempt("user", "write to /proc/PID/mem")
def write_memory(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDWR))


@attempt("user", "find the secret in arguments")
def arguments(facts: Facts) -> str | None:
    words: list[str] = []
    for _, pid in facts["pids"]:
        with contextlib.suppress(OSError):
            words += Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    # The judge knows the hash of the secret, the attacker does not have to.
    hashes = {hashlib.sha256(word.encode()).hexdigest() for line in words for word in (line, *line.split("="))}
    return "a process shows it" if facts["secret_sha256"] in hashes else None


@attempt("user", "list the descriptors of a process")
def list_descriptors(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: list(Path(f"/proc/{pid}/fd").iterdir()))


@attempt("user", "open a process's shared memory through its descriptors")
def open_descriptors(facts: Facts) -> str | None:
    def open_any(pid: int) -> str | None:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                return str(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
        return None

    return try_all(facts, open_any)


@attempt("user", "list mapped files")
def mapped_files(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: list(Path(f"/proc/{pid}/map_files").iterdir()))


@attempt("user", "follow cwd, root and exe")
def links(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: [str(Path(f"/proc/{pid}/{name}").readlink()) for name in ("cwd", "root")])


@attempt("user", "attach a debugger")
def debugger(facts: Facts) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    return try_all(facts, lambda pid: libc.ptrace(PTRACE_ATTACH, pid, 0, 0) == 0)


@attempt("user", "take a descriptor with pidfd_getfd")
def take_descriptor(facts: Facts) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    return try_all(
        facts, lambda pid: any(libc.syscall(PIDFD_GETFD, os.pidfd_open(pid), number, 0) >= 0 for number in range(32))
    )


@attempt("user", "read memory with process_vm_readv")
def read_other_memory(facts: Facts) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(16)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 16)
    remote = (ctypes.c_uint64 * 2)(0x400000, 16)
    return try_all(facts, lambda pid: libc.syscall(PROCESS_VM_READV, pid, local, 1, remote, 1, 0) > 0)


for _signal in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV):

    def _send(facts: Facts, number: signal.Signals = _signal) -> str | None:
        return try_all(facts, lambda pid: os.kill(pid, number) is None)

    ATTEMPTS["user"][f"send {_signal.name}"] = _send


@attempt("user", "limit its resources")
def limit(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (8, 8)))


@attempt("user", "move it to one core")
def affinity(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: os.sched_setaffinity(pid, {0}) is None)


@attempt("user", "lower its priority")
def priority(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19) is None)


@attempt("user", "offer it to the out-of-memory killer")
def out_of_memory(facts: Facts) -> str | None:
    return try_all(facts, lambda pid: os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY))


@attempt("user", "list the job's directory")
def list_directory(facts: Facts) -> str | None:
    return str(list(Path(facts["directory"]).iterdir()))


@attempt("user", "read the secret's file")
def read_secret(facts: Facts) -> str | None:
    return Path(facts["directory"], "secret").read_text()


@attempt("user", "link to the secret's file")
def link_secret(facts: Facts) -> str | None:
    os.link(Path(facts["directory"], "secret"), Path(facts["scratch"], "copy"))
    return "linked"


@attempt("user", "connect to the store's Unix socket")
def unix_socket(facts: Facts) -> str | None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{facts['directory']}/store-0")
    return "connected"


@attempt("user", "create a file in the job's directory")
def create_file(facts: Facts) -> str | None:
    Path(facts["directory"], "mine").write_text("x")
    return "created"


@attempt("user", "rename the job's directory away")
def rename_directory(facts: Facts) -> str | None:
    Path(facts["directory"]).rename(facts["directory"] + ".away")
    return "renamed"


@attempt("user", "remove the job's directory")
def remove_directory(facts: Facts) -> str | None:
    Path(facts["directory"]).rmdir()
    return "removed"


@attempt("user", "overwrite a rank's progress")
def progress(facts: Facts) -> str | None:
    Path(facts["directory"], "attempt-0-rank-0").write_bytes(b"x")
    return "written"


@attempt("user", "open what is in /dev/shm")
def dev_shm(facts: Facts) -> str | None:
    for path in Path("/dev/shm").glob("torch_*"):
        with contextlib.suppress(OSError):
            path.read_bytes()
            return str(path)
    return None


@attempt("user", "connect to the job's abstract sockets")
def abstract_sockets(facts: Facts) -> str | None:
    for line in Path("/proc/net/unix").read_text().splitlines():
        name = line.split()[-1]
        if name.startswith("@torsh"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect("\0" + name[1:])
                sock.sendall(b"0 0\ncmd=init\n")
                if read_all(sock, 0.3):
                    return name
    return None


def main() -> None:
    """Drop to another user, make every attempt of the kinds asked for, and print what each one got."""
    facts: Facts = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(facts["gid"])
    os.setuid(facts["uid"])
    for needs in facts["kinds"]:
        for name, function in ATTEMPTS[needs].items():
            began = time.monotonic()
            try:
                got = function(facts)
            except OSError:
                got = None
            print(
                json.dumps({"name": name, "needs": needs, "got": got, "took_s": time.monotonic() - began}), flush=True
            )


if __name__ == "__main__":
    main()
