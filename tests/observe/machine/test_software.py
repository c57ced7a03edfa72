"""The checks of this machine run, and find what is really there."""

from __future__ import annotations

import socket
import threading

from torsh_distributed.observe.machine.clock_skew import check_clock, measure_skew, serve_clock
from torsh_distributed.observe.machine.diagnostic_result import CheckSeverity
from torsh_distributed.observe.machine.network_checks import check_network
from torsh_distributed.observe.machine.software import validate_environment


def test_every_check_says_what_it_found_and_bad_ones_why_and_what_to_do() -> None:
    results = validate_environment({})
    names = {result.check_name for result in results}
    assert {
        "python",
        "torch",
        "variables",
        "host name",
        "ports",
        "open files",
        "shared memory",
        "memory",
        "GPUs",
    } <= names
    for result in results:
        assert result.description
        if result.severity is not CheckSeverity.OK:
            assert result.reason, result
            assert result.remediation, result
        assert result.to_dict()["severity"] == result.severity.value


def test_a_taken_port_and_an_interface_that_is_not_there_are_found() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        environ = {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "nosuch0", "MASTER_ADDR": "no-such-host.invalid"}
        found = {result.check_name: result for result in check_network(environ)}
    assert port in found["ports"].data["taken"]
    assert found["GLOO_SOCKET_IFNAME"].severity is CheckSeverity.ERROR
    assert found["MASTER_ADDR"].severity is CheckSeverity.ERROR


def test_clocks_of_one_machine_agree_and_a_silent_peer_is_an_error() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(10)
        port = sock.getsockname()[1]
        server = threading.Thread(target=serve_clock, args=(sock,), kwargs={"num_packets": 8})
        server.start()
        skew = measure_skew("127.0.0.1", port)
        server.join()
    assert abs(skew.skew_s) < 0.05
    assert skew.error_s < 0.05
    silent = check_clock("127.0.0.1", port)
    assert silent.severity is CheckSeverity.ERROR
    assert "--serve-clock" in silent.remediation
