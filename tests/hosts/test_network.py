"""The hosts that other tests run on: they are apart, their cables can be cut and lengthened, all goes in the end."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys

import pytest

from tests.hosts.network import Ended, Network, ip, network, why_not

pytestmark = pytest.mark.usefixtures("namespaces")

ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0))
print("port", listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
"""

ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    start = time.monotonic()
    connection.sendall(b"x")
    assert connection.recv(1) == b"x"
    print(time.monotonic() - start)
"""


def echo(net: Network, host: int = 0) -> int:
    """Start an echo server on a host; its port."""
    server = net.hosts[host].start([sys.executable, "-I", "-c", ECHO, net.hosts[host].address])
    return int(server.wait_for(r"port (\d+)")[1])


def ask(net: Network, port: int, of: int = 0, by: int = 1, timeout: float = 30) -> float:
    """Send a byte to the echo server; seconds until it was back."""
    arguments = [sys.executable, "-I", "-c", ASK, net.hosts[of].address, str(port), str(timeout)]
    return float(net.hosts[by].run(arguments).stdout)


def back(connection: socket.socket, data: bytes) -> bytes:
    """A few bytes as they come back."""
    connection.sendall(data)
    return connection.recv(len(data))


def test_hosts_reach_each_other_and_the_calling_process_reaches_them(four_hosts: Network) -> None:
    ports = [echo(four_hosts, index) for index in range(4)]
    for index, port in enumerate(ports):
        ask(four_hosts, port, of=index, by=(index + 1) % 4)
        with socket.create_connection((four_hosts.hosts[index].address, port), timeout=5) as connection:
            assert back(connection, b"hello") == b"hello"


def test_hosts_reach_the_calling_process(two_hosts: Network) -> None:
    with socket.create_server((two_hosts.address, 0)) as listener:
        listener.settimeout(30)
        address, port = listener.getsockname()
        client = two_hosts.hosts[0].start([sys.executable, "-I", "-c", ASK, address, str(port), "30"])
        connection, (peer, _) = listener.accept()
        with connection:
            connection.sendall(connection.recv(1))
        assert client.wait() == 0, client.output
    assert peer == two_hosts.hosts[0].address


def test_a_host_has_a_loopback_of_its_own(two_hosts: Network) -> None:
    server = two_hosts.hosts[0].start([sys.executable, "-I", "-c", ECHO, "127.0.0.1"])
    port = server.wait_for(r"port (\d+)")[1]
    two_hosts.hosts[0].run([sys.executable, "-I", "-c", ASK, "127.0.0.1", port, "30"])
    with pytest.raises(subprocess.CalledProcessError) as refused:
        two_hosts.hosts[1].run([sys.executable, "-I", "-c", ASK, "127.0.0.1", port, "30"])
    assert "ConnectionRefusedError" in refused.value.stderr


def test_a_longer_cable_delays_both_ways_and_can_be_changed(two_hosts: Network) -> None:
    port = echo(two_hosts)
    two_hosts.lengthen(two_hosts.hosts[1], delay=0.03)
    assert ask(two_hosts, port) >= 0.06
    two_hosts.lengthen(two_hosts.hosts[0], delay=0.02)
    assert ask(two_hosts, port) >= 0.1
    two_hosts.lengthen(two_hosts.hosts[1], delay=0.05)
    assert ask(two_hosts, port) >= 0.14


def test_an_open_connection_lives_on_over_a_longer_lossy_cable(two_hosts: Network) -> None:
    port = echo(two_hosts)
    with socket.create_connection((two_hosts.hosts[0].address, port), timeout=60) as connection:
        assert back(connection, b"before") == b"before"
        two_hosts.lengthen(two_hosts.hosts[0], delay=0.001, loss=0.02)
        sent = os.urandom(300_000)
        arrived = b""
        for start in range(0, len(sent), 30_000):
            connection.sendall(sent[start : start + 30_000])
        while len(arrived) < len(sent):
            arrived += connection.recv(65536)
    assert arrived == sent


def test_what_is_lost_is_lost(two_hosts: Network) -> None:
    """Of 400 datagrams a tenth is lost, give or take: fewer than 400 arrive, and more than 300."""
    count = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inbox:
    inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # for all of them, should this process be late
    inbox.bind((sys.argv[1], 0))
    print("port", inbox.getsockname()[1], flush=True)
    seen = 0
    while inbox.recv(100) != b"last":
        seen += 1
    print("seen", seen, flush=True)
"""
    host = two_hosts.hosts[0]
    listening = echo(two_hosts)
    two_hosts.lengthen(host, loss=0.1)
    with socket.create_connection((host.address, listening), timeout=60):
        # Its hardware address is known now, which the kernel forgets when the bridge changes its own: or else
        # asking for it may fail three times, and all that waits for the answer is dropped.
        pass
    counter = host.start([sys.executable, "-I", "-c", count, host.address])
    port = int(counter.wait_for(r"port (\d+)")[1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for _ in range(400):
            sender.sendto(b"x", (host.address, port))
        for _ in range(20):  # one of them comes through
            sender.sendto(b"last", (host.address, port))
    assert 300 < int(counter.wait_for(r"seen (\d+)")[1]) < 400


def test_a_cut_cable_lets_nothing_through_until_it_is_mended(two_hosts: Network) -> None:
    port = echo(two_hosts)
    ask(two_hosts, port)
    with socket.create_connection((two_hosts.hosts[0].address, port), timeout=60) as connection:
        two_hosts.cut(two_hosts.hosts[0])
        with pytest.raises(subprocess.CalledProcessError) as failed:
            ask(two_hosts, port, timeout=0.3)
        assert "TimeoutError" in failed.value.stderr or "No route to host" in failed.value.stderr
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            back(connection, b"lost")
        two_hosts.mend(two_hosts.hosts[0])
        connection.settimeout(60)
        assert connection.recv(4) == b"lost"  # sent again by TCP
    ask(two_hosts, port)


def test_a_process_that_ends_too_early_says_what_it_wrote(two_hosts: Network) -> None:
    process = two_hosts.hosts[0].start([sys.executable, "-I", "-c", "print('other'); raise SystemExit(3)"])
    with pytest.raises(Ended, match="did not write 'port', but:\nother"):
        process.wait_for("port")
    assert process.wait() == 3


def test_nothing_is_left_after_a_failure() -> None:
    fork = "import os, time; print(os.fork(), flush=True); time.sleep(1000)"
    with pytest.raises(ZeroDivisionError), network(2) as net:
        name = net.name
        net.lengthen(net.hosts[0], delay=0.001)
        process = net.hosts[1].start([sys.executable, "-I", "-c", fork])
        child = os.pidfd_open(int(process.wait_for(r"([1-9]\d*)\n")[1]))
        1 / 0  # noqa: B018
    assert process.wait() == -signal.SIGKILL
    with os.fdopen(child):
        assert select.select([child], [], [], 30)[0], "a process outlived its network"
    assert name not in ip("link") and name not in ip("netns", "list")


def test_what_a_killed_process_left_is_removed() -> None:
    """By whoever makes the next network: by then it may have been another process of tests."""
    code = "import os, signal\nfrom tests.hosts.network import ip, network\nwith network(2) as net:\n"
    code += "    print(net.name, net.name in ip('link'), flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    name, there = killed.stdout.split()
    assert there == "True"
    with network(1):
        assert name not in ip("link") and name not in ip("netns", "list")


def test_why_not_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not() is None
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert "apt-get install iproute2" in (why_not() or "")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert "root" in (why_not() or "")
