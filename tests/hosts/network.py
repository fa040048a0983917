"""Several hosts on one machine: network namespaces on a bridge, each with an address of its own.

    with network(2) as net:
        server = net.hosts[0].start([sys.executable, "server.py", net.hosts[0].address])
        server.wait_for(r"listening on port (\\d+)")
        net.hosts[1].run(["client", net.hosts[0].address], timeout=30)
        net.lengthen(net.hosts[1], delay=0.02, loss=0.01)
        net.cut(net.hosts[1])

The calling process is on the network too, as `net.address`: a controller may run there, or in a host of its own. The
hosts share this machine's files, shared memory and processes, but not its network, abstract sockets included.
Everything is removed at the end, and what a killed process left behind when the next network is made.
"""

from __future__ import annotations

import fcntl
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests import python

WIRE = Path(__file__).with_name("wire.py")
NAME = re.compile(r"mt(\d+)\.\d+[a-z]?\d*")  # of what is made here: which process made it, the subnet, and what it is


def why_not() -> str | None:
    """Why no network can be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only"
    missing = [tool for tool in ("ip", "nsenter", "setpriv") if shutil.which(tool) is None]
    if missing:
        return f"there is no {missing[0]} on the PATH (on Debian: apt-get install iproute2 util-linux)"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun, so that no cable can be lengthened"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30)
    if probe.returncode != 0:
        return f"network namespaces do not work here: {probe.stderr.strip()}"
    return None


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=True).stdout


class Ended(AssertionError):
    """A process on a host ended, or stayed silent, before it said what was waited for."""


class Process:
    """A process on a host. What it writes, on both outputs, is kept as text. It ends with the network, or before."""

    def __init__(self, start: Callable[..., subprocess.Popen[str]], environment: Mapping[str, str] | None) -> None:
        self._running = start(
            env=None if environment is None else {**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.pid = self._running.pid
        self._text = ""
        self._over = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._running.stdout is not None
        for line in self._running.stdout:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def output(self) -> str:
        with self._changed:
            return self._text

    def wait_for(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """The first place in the output that matches, once there is one. Raises Ended, with all that was written."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or re.search(pattern, self._text), timeout)
            if (found := re.search(pattern, self._text)) is None:
                how = "ended" if self._over else f"ran on for {timeout} s"
                raise Ended(f"process {self.pid} {how} and did not write {pattern!r}, but:\n{self._text}")
            return found

    def wait(self, timeout: float = 60) -> int:
        """Its exit status, once it has ended by itself; a negative one is a signal's number."""
        status = self._running.wait(timeout)
        self._reader.join(timeout)
        return status

    def signal(self, number: int) -> None:
        self._running.send_signal(number)

    def end(self) -> None:
        """Kill it, and wait until it is gone. What its own children still write is not waited for."""
        if self._running.poll() is None:
            self._running.kill()
        self._running.wait()


@dataclass
class Host:
    """A network namespace with one link, `eth0`, and a loopback of its own."""

    name: str
    address: str
    _port: str
    _processes: list[Process] = field(default_factory=list)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` on this host. It becomes that process, and dies with its parent."""
        inside = ["nsenter", f"--net=/run/netns/{self.name}", "setpriv", "--pdeathsig", "KILL", "--"]
        return [*inside, *map(str, arguments)]

    def start(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start a process; `environment` is added to this process's own."""
        return self._started(partial(subprocess.Popen, self.command(arguments)), environment)

    def program(self, *program: object, environment: Mapping[str, str] | None = None) -> Process:
        """Start a Python program (tests/python.py); `environment` is added to this process's own."""
        return self._started(partial(python.Popen, *program, network=self.name), environment)

    def _started(self, start: Callable[..., subprocess.Popen[str]], environment: Mapping[str, str] | None) -> Process:
        process = Process(start, environment)
        self._processes.append(process)
        return process

    def run(
        self, arguments: Sequence[str], timeout: float = 60, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a process to its end. A status other than 0 raises CalledProcessError."""
        return subprocess.run(
            self.command(arguments),
            env=None if environment is None else {**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=True,
        )


class Network:
    """Hosts on one bridge, `address` being this process's own. Made by `network`."""

    def __init__(self, name: str, subnet: str, hosts: list[Host], undo: ExitStack) -> None:
        self.address = f"{subnet}.254"
        self.hosts = hosts
        self.name = name
        self._undo = undo
        self._wires: dict[str, subprocess.Popen[str]] = {}

    def cut(self, host: Host) -> None:
        """Pull its cable: nothing more comes through either way, and nobody is told."""
        ip("link", "set", host._port, "down")

    def mend(self, host: Host) -> None:
        ip("link", "set", host._port, "up")

    def lengthen(self, host: Host, delay: float = 0.0, loss: float = 0.0) -> None:
        """Whatever passes over its cable, either way, comes `delay` seconds later, or is lost with probability `loss`.

        May be called again. The first call puts a process between host and bridge that copies frames (wire.py): not
        every kernel has `tc`'s netem. Connections live on; some 50 MB/s come through.
        """
        number = host._port.rpartition("h")[2]
        if host.name not in self._wires:
            near, far, own = (f"{self.name}{letter}{number}" for letter in "stb")
            wire = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-I", str(WIRE), near, far],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._undo.callback(_finish, wire)
            self._wires[host.name] = wire
            _answer(wire)  # the two ends are there
            _bridge(own, self._undo)
            ip("link", "set", near, "master", own, "up")
            ip("link", "set", far, "master", self.name, "up")
            ip("link", "set", host._port, "master", own)
        wire = self._wires[host.name]
        assert wire.stdin is not None
        wire.stdin.write(f"{delay} {loss}\n")
        wire.stdin.flush()
        _answer(wire)


def _answer(wire: subprocess.Popen[str]) -> None:
    assert wire.stdout is not None
    if wire.stdout.readline() != "ready\n":
        raise OSError(f"{WIRE.name} ended with status {wire.wait(10)}")


def _finish(wire: subprocess.Popen[str]) -> None:
    wire.kill()
    wire.wait()
    assert wire.stdin is not None and wire.stdout is not None
    wire.stdin.close()
    wire.stdout.close()


def _bridge(name: str, undo: ExitStack) -> None:
    ip("link", "add", name, "type", "bridge")
    undo.callback(ip, "link", "delete", name)
    ip("link", "set", name, "up")


def _remove_left_behind() -> None:
    """Remove the networks of processes that no longer run."""

    def left(names: Iterator[re.Match[str]]) -> list[str]:
        return [found[0] for found in names if not Path("/proc", found[1]).exists()]

    namespaces = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    for name in left(found for name in namespaces if (found := NAME.fullmatch(name))):
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)
    for name in left(found for name in os.listdir("/sys/class/net") if (found := NAME.fullmatch(name))):
        # It may be gone meanwhile, with the namespace that its other end was in.
        subprocess.run(["ip", "link", "delete", name], capture_output=True, timeout=30)


@contextmanager
def network(hosts: int) -> Iterator[Network]:
    """A network of up to 9 hosts, 10.213.X.1 and so on with a random X, and this process at 10.213.X.254."""
    with ExitStack() as undo:
        with open(__file__) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # nobody else looks which numbers are free before ours is taken
            _remove_left_behind()
            taken = re.findall(r"\b10\.213\.(\d+)\.", ip("-4", "address"))
            number = random.SystemRandom().choice([x for x in range(256) if str(x) not in taken])
            subnet, name = f"10.213.{number}", f"mt{os.getpid()}.{number}"
            _bridge(name, undo)
            ip("address", "add", f"{subnet}.254/24", "dev", name)
        made = []
        for index in range(1, hosts + 1):
            host = Host(f"{name}n{index}", f"{subnet}.{index}", f"{name}h{index}")
            ip("netns", "add", host.name)
            undo.callback(ip, "netns", "delete", host.name)
            ip("link", "add", host._port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            undo.callback(ip, "link", "delete", host._port)  # both ends; the namespace itself goes a little later
            ip("link", "set", host._port, "master", name, "up")
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
            undo.callback(_end_all, host)
            made.append(host)
        yield Network(name, subnet, made, undo)


def _end_all(host: Host) -> None:
    """End what was started on a host, and what that started in turn: nothing else runs in its namespace."""
    for process in host._processes:
        process.end()
    for pid in ip("netns", "pids", host.name).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended meanwhile
