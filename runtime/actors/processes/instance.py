"""A running actor: its thread, the meshes that it owns, and how it ends.

An actor handles one message at a time, in a thread of its own; an actor whose endpoints are `async def` has an event
loop there. It ends when it is stopped, or dies: of what its constructor raises, of an exception in a message that
wants no reply, of an exception that is no Exception (SystemExit) in any, of a failure that it does not deal with. Then
it takes no more messages, waits for the end of what it owns, and runs its `__cleanup__`. What comes later is answered
with SupervisionError. What else follows, `ownership` decides.

An actor hears of failures between messages; one with an event loop also while an endpoint of its own awaits: its
`__supervise__` then runs beside the endpoint, which is cancelled if the actor dies of the failure.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.config import settings
from monarch.compiler.execution.events import Handled, Status, heard, tell
from monarch.compiler.mesh import Point
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.channel import Port
from monarch.runtime.actors.debugging.stacks import stack_of
from monarch.runtime.actors.endpoint import ActorInterface
from monarch.runtime.actors.errors import ActorError, MeshFailure, SupervisionError
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import CALL, Head, Owner, ReplyTo
from monarch.runtime.actors.processes.circles import awaited_by, awaited_in, frame_of
from monarch.runtime.actors.processes.current import Context, running
from monarch.runtime.actors.processes.exits import Abandoned, End, end_thread
from monarch.runtime.actors.processes.hearing import HeldAnswers
from monarch.runtime.actors.processes.identity import Instance
from monarch.runtime.actors.processes.mailbox import Mailbox, Stop
from monarch.runtime.actors.processes.ownership import Cleaned, Ends, Supervised

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process
    from monarch.runtime.future import Future

Call = tuple[str, Head, Payload]
"""The sender, the head and the payload."""
Refusal = tuple[str, int, str, Point]
"""The name of an actor that has ended, its rank, the reason, and its place in its mesh."""


def _initialized() -> None:
    """The call of `mesh.initialized`: there is an actor that can be called."""


class LocalActor:
    """An actor of this process. `put`, `fail` and `stop` are for any thread; all else happens in the actor's own."""

    def __init__(self, process: Process, actor_id: str, rank: int, name: str, owner: Owner, payload: Payload) -> None:
        self.instance = Instance(process, actor_id, name)
        self.owner = owner
        self.rank = rank
        self.ended: str | None = None
        """Why it takes no messages any more."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop, of an actor that has one."""
        self._process = process
        self._payload: Payload | None = payload
        self._actor: Any = None
        self._interface: ActorInterface
        self._lock = threading.Lock()
        self._mailbox: Mailbox[Call] = Mailbox()
        self._asleep = False
        self._awake = threading.Lock()
        self._awake.acquire()
        self._rouse: Callable[[], object] = self._awake.release
        self._alone = False
        self._stops: list[ReplyTo] | None = []
        self._killed = HeldAnswers(process, actor_id)
        """The caller whose call the actor died of."""
        self._aborted = False
        self._alert: Callable[[], object] = lambda: None
        """Called when a failure comes, also while a message is handled."""
        self._main: asyncio.Task[None] | None = None
        """Its task, of an actor with an event loop."""
        self._calling = False
        """Whether an endpoint that is not concurrent runs, of an actor with an event loop."""
        self._unhandled: End | None = None
        """Ends the actor before the call that it handles is answered: a failure that was not dealt with while such an
        endpoint awaited, or `abort`."""
        self._under_way: dict[int, Call] = {}
        """The calls that it handles."""
        self._handled = 0
        self.supervises: tuple[MeshFailure, float] | None = None
        """The failure that its `__supervise__` deals with, and since when."""
        self._watched = False
        """Whether it was stopped, and the process watches whether it does stop."""
        self._abandoned = False
        """It was stopped and did not: it counts as ended."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, call: Call) -> None:
        """Have a call handled, or refused."""
        with self._lock:
            taken = self._mailbox.put(call)
            rouse, self._asleep = self._asleep, False
        if rouse:
            self._rouse()
        if not taken:
            self._refuse(call)

    def fail(self, failure: MeshFailure) -> None:
        """Tell it that something that it owns has failed."""
        with self._lock:
            self._mailbox.put_failure(failure)
            rouse, self._asleep = self._asleep, False
        if rouse:
            self._rouse()
        self._alert()

    def stop(self, reason: str, reply: ReplyTo | None) -> None:
        """End it after the messages that have come; `reply` gets the answer when it has ended."""
        with self._lock:
            ended = self._stops is None
            if self._stops is not None and reply is not None:
                self._stops.append(reply)
            self._mailbox.stop(reason)
            rouse, self._asleep = self._asleep, False
            watched, self._watched = self._watched, True
        if rouse:
            self._rouse()
        if not watched and not ended:
            self._watch(-1)
        if ended and reply is not None:
            self._process.reply(reply, True, None)

    def look(self) -> dict[str, Any]:
        """Its activity: name, class_name, queued (messages that wait), running (the endpoints that do not)."""
        running = [head[3] or "initialized" for _, head, _ in list(self._under_way.values())]
        about = {"name": self.instance.label, "class_name": self.instance.class_name or ""}
        return {**about, "queued": len(self._mailbox), "running": running}

    def abort(self, reason: str) -> None:
        """Have it die before it handles another message, or answers the one that it handles."""
        with self._lock:
            self._aborted = True
            self._unhandled = self._unhandled or End(reason, MonarchError(reason))
            rouse, self._asleep = self._asleep, False
        if rouse:
            self._rouse()
        self._alert()

    # -- whom it waits for (see `circles`) -----------------------------------------------------------------------------

    def waits_for(self) -> Future[Any] | None:
        """The answers that it waits for, without a timeout, before it handles another message."""
        if self.loop is None:
            return awaited_in(frame_of(self._thread))
        return awaited_by(self._main.get_coro()) if self._calling and self._main is not None else None

    def has(self, reply: ReplyTo) -> bool:
        """Whether a call to be answered there has come, and is not answered before it handles another message."""
        with self._lock:
            calls = list(self._mailbox.messages())
        calls += [
            call
            for call in list(self._under_way.values())
            if not call[1][4] and not (self.loop is not None and self._is_concurrent(call[1]))
        ]
        return any(head[0] == CALL and head[2] is not None and head[2][:3] == reply for _, head, _ in calls)

    # -- one that does not come to an end ------------------------------------------------------------------------------

    def where(self) -> str:
        """The stack of its thread, or of its task."""
        return stack_of(self._thread, self.loop)

    def _watch(self, handled: int) -> None:
        """An actor that was stopped, and that had handled `handled` messages at the last look, is given up where it has
        handled none since. In the I/O thread but for the first time."""
        if self._stops is None or self._abandoned:
            return
        # Before the process is killed, which is to end in order.
        seconds = min(settings.stop_actor_timeout, self._process.leaving / 2)
        if handled == self._handled:
            self._abandon(seconds)
        else:
            self._process.router.later(seconds, partial(self._watch, self._handled))

    def _abandon(self, seconds: float) -> None:
        self._abandoned = True
        sys.stderr.write(
            f"monarch: '{self.instance.label}' did not stop within {seconds:g} s."
            f" It counts as ended; it is here:\n{self.where()}"
        )
        sys.stderr.flush()
        self._close(End(f"it had not stopped {seconds:g} s after the request"))
        for call in list(self._under_way.values()):
            self._refuse(call)
        # Ends a loop in Python, and a coroutine that awaits. Code that waits in C stays, in a thread that nothing waits
        # for.
        end_thread(self._thread.ident or 0, Abandoned)
        with suppress(RuntimeError):  # the loop is closed
            if self.loop is not None:
                self.loop.call_soon_threadsafe(lambda: None)

    @property
    def refusal(self) -> Refusal:
        """For messages from now on."""
        return self.instance.name, self.rank, self.ended or "it was told to stop", self.instance.rank

    def _take(self) -> MeshFailure | Call | Stop | None:
        """The next item. None: `_rouse` is called once there is one."""
        with self._lock:
            item = self._mailbox.take()
            self._asleep = item is None
            self._handled += 1
            return item

    def _take_failure(self) -> MeshFailure | None:
        with self._lock:
            return self._mailbox.take_failure()

    def _refuse(self, call: Call) -> None:
        call[2].drop()
        sender, head, _ = call
        if self._aborted and head[2] is not None:
            name, rank, reason, place = self.refusal
            self._killed.answer(head[2], SupervisionError.refusing(name, rank, place, head[3], reason))
        else:
            self._process.refuse(sender, head, *self.refusal)

    # -- the actor's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._process.threads)
        if self.owner[0] != self._process.address:  # the bootstrap's own actors do not wait for its end
            self._process.ready.wait()
        self._enter()
        try:
            self._load()
        except BaseException as error:
            self._finish_sync(self._died(error, "its arguments could not be read"))
            return
        with suppress(Abandoned):
            if self._interface.is_async:
                asyncio.run(self._run_async())
            else:
                self._run_sync()

    def _load(self) -> None:
        """Read the class and the arguments. Raises whatever unpickling raises."""
        assert self._payload is not None
        mesh, origin, self._args, self._kwargs = self._payload.decode()
        self._payload = None
        self.instance.becomes(mesh, self.rank, origin)
        self._is_now("Created")
        self._interface = ActorInterface.of(mesh._cls)
        self._enter()

    def _enter(self) -> None:
        """No message runs now: the actor's place is that in the mesh as spawned."""
        rank = self.instance.rank
        running.set(Context(self.instance, (rank.rank, tuple(rank.extent.labels), tuple(rank.extent.sizes))))

    def _construct(self) -> None:
        args, kwargs = self._args, self._kwargs
        del self._args, self._kwargs
        try:
            self._actor = self._interface.cls(*args, **kwargs)
        except BaseException as error:
            raise self._died(error, "its constructor raised") from error
        self._is_now("Idle")

    def _is_now(self, status: str, reason: str = "") -> None:
        """Tell the subscribers."""
        if heard(Status):
            at = self.instance.actor_id, self.rank, self.instance.label
            tell(Status("actor", *at, status, self.instance.class_name or "", reason))

    def _has_handled(self, call: Call, start: int, well: bool) -> None:
        """Likewise, of a message, before it is answered: a caller that has the answer finds it recorded. `start` is
        when it came to it, on the monotonic clock."""
        if heard(Handled):
            sender, head, _ = call
            actor = self.instance.actor_id, self.rank, self.instance.label
            tell(Handled(*actor, head[3] or "initialized", sender, start, monotonic_ns(), len(self._mailbox), well))

    def _method(self, head: Head) -> Callable[..., Any]:
        return getattr(self._actor, head[3]) if head[3] else _initialized

    def _arguments(self, head: Head, payload: Payload) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = payload.decode()
        if head[4]:
            args = (Port(head[2], f"{self.instance.label}.{head[3]}"), *args)
        return args, kwargs

    def _called(self, head: Head, payload: Payload) -> Any:
        """The result of an endpoint. In a frame of its own, so that its arguments are dropped before the reply goes: a
        program's next step may then replace in place the tensors that were among them."""
        args, kwargs = self._arguments(head, payload)
        return self._method(head)(*args, **kwargs)

    def _raised(self, head: Head, error: BaseException) -> None:
        """An endpoint raised: its caller gets the error, or the actor dies of it."""
        where = f"{self.instance.label}.{head[3]}"
        if head[2] is not None and isinstance(error, (Exception, asyncio.CancelledError)):
            self._process.reply(head[2], False, ActorError.of(error, where, self.instance.rank))
            return
        if head[2] is not None:
            said = ActorError.of(error, where, self.instance.rank).message
            self._killed.answer(head[2], SupervisionError(f"'{self.instance.label}' died: {said}", where))
        raise self._died(error, f"{head[3]} raised") from error

    def _died(self, error: BaseException, what: str) -> End:
        """The end of the actor, for an error that was just caught."""
        detail = f"{what}:\n{''.join(traceback.format_exception(error)).rstrip()}"
        told = error if isinstance(error, Exception) else ActorError.of(error, self.instance.label)
        return End(f"{what} {type(error).__name__}: {error}", told, detail)

    def _supervised(self, failure: MeshFailure, handled: bool, error: BaseException | None = None) -> None:
        """Report the outcome of a failure: it goes on to the owner, and this actor ends, where it was not dealt
        with."""
        self.supervises = None
        trace = "" if error is None else "".join(traceback.format_exception(error)).rstrip()
        self._process.supervision(Supervised(self.instance.actor_id, failure, handled, trace))
        if error is not None:
            raise self._died(error, "__supervise__ raised")
        if not handled:
            raise End(f"a failure of '{failure.mesh_name}' was not dealt with", MonarchError(failure.report()))

    # -- def endpoints -------------------------------------------------------------------------------------------------

    def _run_sync(self) -> None:
        try:
            self._construct()
            while True:
                if self._unhandled is not None:
                    raise self._unhandled
                item = self._take()
                if item is None:
                    self._awake.acquire()
                else:
                    self._handle_sync(item)
        except End as end:
            self._finish_sync(end)

    def _handle_sync(self, item: MeshFailure | Call | Stop) -> None:
        if isinstance(item, tuple):
            _, head, payload = item
            running.set(Context(self.instance, head[5]))
            self._under_way[0] = item
            start = monotonic_ns()
            try:
                value = self._called(head, payload)
                if self._unhandled is not None:
                    raise self._unhandled
            except BaseException as error:
                self._has_handled(item, start, False)
                if self._unhandled is not None:
                    self.ended = self._unhandled.reason
                    self._refuse(item)
                    raise self._unhandled from None
                self._raised(head, error)
            else:
                self._has_handled(item, start, True)
                if head[2] is not None and not head[4]:
                    self._process.reply(head[2], True, value, lambda: f"what {self.instance.label}.{head[3]} gave")
            finally:
                del self._under_way[0]
        elif isinstance(item, MeshFailure):
            try:
                handled = self._supervise(item)
            except BaseException as error:
                self._supervised(item, False, error)
            else:
                self._supervised(item, bool(handled))
        else:
            raise End(item.reason)

    def _supervise(self, failure: MeshFailure) -> Any:
        supervise = getattr(self._actor, "__supervise__", None)
        self.supervises = failure, monotonic()
        self._enter()
        return False if supervise is None else supervise(failure)

    def _finish_sync(self, end: End) -> None:
        self._close(end)
        while not self._alone:
            self._awake.acquire()
        self._enter()
        trace = ""
        try:
            cleanup = getattr(self._actor, "__cleanup__", None)
            if cleanup is not None:
                cleanup(end.error)
        except BaseException as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
        self._cleaned(trace)

    def _close(self, end: End) -> None:
        """Take no more messages, and end the meshes that it owns."""
        self.ended = end.reason
        self._is_now("Stopped" if end.error is None else "Failed", end.reason)
        with self._lock:
            left = self._mailbox.close()
        for call in left:
            self._refuse(call)
        self._process.supervision(Ends(self.instance.actor_id, end.detail, end.error is not None))

    def alone(self) -> None:
        """Tell it that all that it owned has ended. From any thread."""
        self._alone = True
        if self._abandoned:
            self._cleaned("")
        self._rouse()

    def _cleaned(self, trace: str) -> None:
        self._actor = None
        self._process.supervision(Cleaned(self.instance.actor_id, trace))

    def bury(self) -> None:
        """It has ended: the callers that stopped it get their answers. From any thread."""
        with self._lock:
            stops, self._stops = self._stops or [], None
        self._killed.release()
        for reply in stops:
            self._process.reply(reply, True, None)

    # -- async def endpoints -------------------------------------------------------------------------------------------

    async def _run_async(self) -> None:
        loop = self.loop = asyncio.get_running_loop()
        main = self._main = asyncio.current_task()
        assert main is not None
        awake = asyncio.Event()
        tasks: dict[asyncio.Task[None], Call] = {}
        ending: list[End] = []
        attending: list[asyncio.Task[None]] = []
        dropped = False

        def rouse() -> None:
            with suppress(RuntimeError):  # the loop is closed: the actor has ended
                loop.call_soon_threadsafe(awake.set)

        def alert() -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(attend)

        def attend() -> None:
            if self._calling and (not attending or attending[0].done()):
                attending[:] = [loop.create_task(hear())]

        async def hear() -> None:
            """Deal with the failures that come while an endpoint awaits, and end it where the actor is to die."""
            nonlocal dropped
            try:
                while self._unhandled is None and (failure := self._take_failure()) is not None:
                    await self._handle_async(failure)
            except End as end:
                self._unhandled = self._unhandled or end
            if self._unhandled is not None and self._calling and not dropped:
                dropped = main.cancel()

        async def beside(call: Call) -> None:
            try:
                await self._call_async(call)
            except End as end:
                ending.append(end)
                awake.set()

        # Messages that came before the loop ran released the lock instead.
        self._rouse, self._alert = rouse, alert
        awake.set()
        end: End
        try:
            self._construct()
            while True:
                if ending:
                    raise ending[0]
                if self._unhandled is not None:
                    self.ended = self._unhandled.reason
                    raise self._unhandled
                item = self._take()
                if isinstance(item, tuple) and item[2].lent:
                    await loop.run_in_executor(None, item[2].wait)
                if item is None:
                    await awake.wait()
                    awake.clear()
                elif isinstance(item, tuple) and self._is_concurrent(item[1]):
                    task = loop.create_task(beside(item))
                    tasks[task] = item
                    task.add_done_callback(tasks.pop)
                elif isinstance(item, tuple):
                    await self._call_alone(item, main)
                    if attending:
                        await attending[0]
                else:
                    await self._handle_async(item)
        except End as ended:
            end = ended
        self._close(end)
        left = dict(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for task, call in left.items():
            if task.cancelled():
                self._refuse(call)
        while not self._alone:
            await awake.wait()
            awake.clear()
        self._enter()
        trace = ""
        try:
            cleanup = getattr(self._actor, "__cleanup__", None)
            result = None if cleanup is None else cleanup(end.error)
            if isinstance(result, Awaitable):
                await result
        except BaseException as error:
            trace = "".join(traceback.format_exception(error)).rstrip()
        self._cleaned(trace)

    def _is_concurrent(self, head: Head) -> bool:
        method = self._interface.endpoints.get(head[3])
        return method is not None and method.concurrent

    async def _call_alone(self, call: Call, main: asyncio.Task[None]) -> None:
        """Handle a call, beside which failures may come: of one that is not dealt with the caller hears."""
        self._calling = True
        try:
            await self._call_async(call)
        except asyncio.CancelledError:
            if self._unhandled is None:
                raise
            main.uncancel()
            self.ended = self._unhandled.reason
            self._refuse(call)
        finally:
            self._calling = False

    def _is_dropped(self, head: Head) -> bool:
        """Whether a failure that was not dealt with ends the call that is running, whatever the call makes of that."""
        return self._unhandled is not None and not self._is_concurrent(head)

    async def _handle_async(self, item: MeshFailure | Stop) -> None:
        if isinstance(item, MeshFailure):
            try:
                handled = self._supervise(item)
                if isinstance(handled, Awaitable):
                    handled = await handled
            except BaseException as error:
                self._supervised(item, False, error)
            else:
                self._supervised(item, bool(handled))
        else:
            raise End(item.reason)

    async def _call_async(self, call: Call) -> None:
        _, head, payload = call
        running.set(Context(self.instance, head[5]))
        self._under_way[id(call)] = call
        start = monotonic_ns()
        try:
            value = self._called(head, payload)
            if isinstance(value, Awaitable):
                value = await value
        except BaseException as error:
            self._has_handled(call, start, False)
            if self.ended is not None and isinstance(error, asyncio.CancelledError):
                raise  # the actor ends, and it is refused
            if self._is_dropped(head):
                raise asyncio.CancelledError from error
            self._raised(head, error)
        else:
            if self._is_dropped(head):
                raise asyncio.CancelledError
            self._has_handled(call, start, True)
            if head[2] is not None and not head[4]:
                self._process.reply(head[2], True, value, lambda: f"what {self.instance.label}.{head[3]} gave")
        finally:
            del self._under_way[id(call)]
