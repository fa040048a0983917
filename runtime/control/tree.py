"""The controller's end: hosts attached as a tree."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Sequence

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import limits
from monarch.runtime.control.handshake import Release
from monarch.runtime.control.host_info import release
from monarch.runtime.control.hub import Hub
from monarch.runtime.control.inbox import Handoff, Inbox
from monarch.runtime.control.loop import log, run
from monarch.runtime.control.message import Message
from monarch.runtime.control.outbox import cost
from monarch.runtime.control.records import (
    Assembly,
    Attach,
    Attached,
    Forget,
    HostInfo,
    HostPart,
    Lost,
    Progress,
    Record,
    Start,
    ranges,
    started,
)
from monarch.runtime.control.relay import Down, Relay
from monarch.runtime.control.security import Security

Receive = Callable[[Message], None]
Loss = Callable[[int, str], None]


class HostTree:
    """Hosts that are attached. Each is reached over at most log(hosts) / log(fan_out) others.

    `addresses`  "node1:4242"; host i is the i-th of them
    `timeout`    seconds after which a host that does not answer, or takes nothing, is lost; also to attach one
    `reconnect`  seconds for which both ends of a connection that breaks wait for another one

    Raises MonarchError, with every host that cannot be attached and why; then none is attached.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security,
        fan_out: int = 8,
        timeout: float = 10.0,
        reconnect: float = 5.0,
        *,
        own: Release | None = None,
    ) -> None:
        _check(addresses, security, fan_out, timeout, reconnect)
        self.timeout = timeout
        self.hosts: tuple[HostInfo, ...] = ()
        self._lock = threading.Lock()
        self._subscribers: dict[int, tuple[Receive, Loss]] = {}
        self._lost: dict[int, str] = {}
        self._closed = False
        self._inbox: Inbox[Message | Lost | None] = Inbox()
        self._outgoing: Handoff[Record] = Handoff(self._give)
        self._owner = os.getpid()
        self._limits = security, fan_out, timeout, reconnect
        self._joining = threading.Lock()
        try:
            run(self._open(security, own or release()))
            self._attach(addresses)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._deliver, name="monarch-hosts", daemon=True)
        self._thread.start()

    async def _open(self, security: Security, own: Release) -> None:
        self._up = _Up(self)
        self._hub = Hub(Relay(controller=True), security, own, self._up, bounded=False)

    def _attach(self, addresses: Sequence[str]) -> None:
        _, fan_out, timeout, reconnect = self._limits
        attached = run(self._ask(Attach(len(self.hosts), tuple(addresses), fan_out, timeout, reconnect)))
        if attached.failures:
            raise _unreachable(addresses, len(self.hosts), attached)

    async def _ask(self, attach: Attach) -> Attached:
        answer = self._up.expect(len(attach.addresses))
        self._hub.handle(Down(attach))
        return await answer

    def join(self, address: str) -> None:
        """Attach another host, which gets the next number; it is reached directly. Raises MonarchError where it cannot
        be attached."""
        with self._joining:
            if self._closed or os.getpid() != self._owner:
                raise MonarchError("the hosts are detached")
            _check((*(host.address for host in self.hosts), address), *self._limits)
            self._attach([address])

    # -- down ------------------------------------------------------------------------------------------------------

    def send(self, message: Message, hosts: Sequence[int] | None = None) -> None:
        """Send it to some hosts, or to all. From any thread; returns before it has arrived, and its data must not
        change from then on. Hosts that are lost get nothing. Raises MonarchError where the tree is closed or all hosts
        are lost, or where for twice the timeout no more could be sent because hosts take too little."""
        if hosts is not None and not all(0 <= host < len(self.hosts) for host in hosts):
            raise ValueError(f"there are hosts 0 to {len(self.hosts) - 1}, and a message is for {list(hosts)}")
        self._put(started(message, targets=None if hosts is None else ranges(hosts)))

    def _put(self, record: Record) -> None:
        if self._closed or os.getpid() != self._owner:
            raise MonarchError("the hosts are detached")
        if len(self._lost) == len(self.hosts):
            raise MonarchError(f"all {len(self.hosts)} hosts are lost: {next(iter(self._lost.values()), '')}")
        # Longer than it takes to find out that a host is stuck, and to give it up.
        if not self._outgoing.put(record, cost(record), 2 * self.timeout):
            raise MonarchError(
                f"the hosts have taken too little for {2 * self.timeout:g} s",
                hint=f"{limits.QUEUE_BYTES >> 20} MiB wait for them already.",
            )

    def _give(self, records: list[Record]) -> None:
        for record in records:
            self._hub.handle(Down(record))
        if self._hub.full:
            self._releasing = asyncio.ensure_future(self._release())
        else:
            self._outgoing.release()

    async def _release(self) -> None:
        await self._hub.room()
        self._outgoing.release()

    # -- up --------------------------------------------------------------------------------------------------------

    def subscribe(self, mesh: int, receive: Receive, lost: Loss) -> None:
        """From now on, call `receive` with the messages of hosts about this mesh, and `lost(host, reason)` for each
        host that is lost, those that are lost already included. Both are called in one thread that all meshes share."""
        with self._lock:
            self._subscribers[mesh] = receive, lost
            known = list(self._lost.items())
        for host, reason in known:
            lost(host, reason)

    def unsubscribe(self, mesh: int) -> None:
        with self._lock:
            self._subscribers.pop(mesh, None)
        if not self._closed and len(self._lost) < len(self.hosts):
            self._put(Forget(mesh))

    def _deliver(self) -> None:
        while (item := self._inbox.take()) is not None:
            try:
                if isinstance(item, Lost):
                    self._lose(item)
                else:
                    with self._lock:
                        subscriber = self._subscribers.get(item.mesh)
                    if subscriber is not None and item.host not in self._lost:
                        subscriber[0](item)
            except Exception as error:
                log.error("a host's message could not be processed", exc_info=error)

    def _lose(self, lost: Lost) -> None:
        for host in range(lost.start, lost.stop):
            with self._lock:
                if host in self._lost:
                    continue
                reason = self._lost[host] = f"host {host} ({self.hosts[host].address}) is lost: {lost.reason}"
                subscribers = list(self._subscribers.values())
            for _, tell in subscribers:
                tell(host, reason)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Detach the hosts: all that runs on them for this controller ends. Waits for it, at most for the timeout."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            closed, self._closed = self._closed, True
        if closed:
            return
        self._outgoing.end()
        try:
            run(self._hub.close(self.timeout), 2 * self.timeout)  # also where its loop is stuck
        except TimeoutError:
            log.warning("the hosts have not been released within %g s", 2 * self.timeout)
        self._inbox.put(None)


class _Up:
    """Where the relay's messages for above go."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = weakref.proxy(tree)
        self._assembly = Assembly()

    def expect(self, hosts: int) -> asyncio.Future[Attached]:
        """So many hosts are asked for: a future that is done when all have answered. In the loop."""
        self._unheard = hosts
        self._infos: list[HostInfo] = []
        self._failures: list[tuple[int, str]] = []
        self._answer: asyncio.Future[Attached] = asyncio.get_running_loop().create_future()
        return self._answer

    @property
    def full(self) -> bool:
        return self._tree._inbox.full

    async def room(self) -> None:
        await self._tree._inbox.room()

    def put(self, record: Record) -> None:
        match record:
            case Start() | HostPart():
                if (message := self._assembly.take(record)) is not None:
                    self._tree._inbox.put(message, limits.RECORD_COST + len(message.data))
            case Progress(kind, mesh, numbers):
                self._tree._inbox.put(Message(kind, mesh, progress=numbers))
            case Lost(start, stop):
                self._assembly.drop(start, stop)
                self._tree._inbox.put(record)
            case Attached(hosts, failures):
                self._infos += hosts
                self._failures += failures
                if len(self._infos) + len(self._failures) == self._unheard:
                    if not self._failures:  # at once: the next messages about them need them
                        self._tree.hosts = (*self._tree.hosts, *self._infos)
                    self._answer.set_result(Attached(tuple(self._infos), tuple(self._failures)))


def _check(addresses: Sequence[str], security: Security, fan_out: int, timeout: float, reconnect: float) -> None:
    least, most = limits.TIMEOUT_SECONDS
    if not 1 <= len(addresses) <= limits.HOSTS:
        raise MonarchError(f"{len(addresses)} hosts to attach: 1 to {limits.HOSTS:,} can be")
    if not 1 <= fan_out <= limits.FAN_OUT:
        raise MonarchError(f"a fan-out of {fan_out}: it has to be 1 to {limits.FAN_OUT}")
    if not least <= timeout <= most:
        raise MonarchError(f"a timeout of {timeout} s: it has to be {least} s to {most} s")
    if not limits.RECONNECT_SECONDS[0] <= reconnect <= limits.RECONNECT_SECONDS[1]:
        raise MonarchError(f"{reconnect} s to reconnect: it has to be {limits.RECONNECT_SECONDS[0]:g} s to {most:g} s")
    for address in addresses:
        security.check(address)
    twice = next((address for at, address in enumerate(addresses) if address in addresses[:at]), None)
    if twice:
        raise MonarchError(f"{twice} is twice among the hosts")


def _unreachable(addresses: Sequence[str], first: int, attached: Attached) -> MonarchError:
    lines = "\n".join(f"  {addresses[number - first]}: {reason}" for number, reason in attached.failures)
    return MonarchError(
        f"{len(attached.failures)} of {len(addresses)} hosts cannot be attached:\n{lines}",
        hint="on each, `monarch host --listen ADDRESS` has to run, with the same token or certificates of the same CA.",
    )
