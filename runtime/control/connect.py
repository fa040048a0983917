"""Opening a stream to a host."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from monarch.runtime.control import limits
from monarch.runtime.control.handshake import Agreed, ControllerHandshake, Refused, Release, Session
from monarch.runtime.control.records import Malformed
from monarch.runtime.control.security import Security

METHOD = "/monarch.control.Hosts/Attach"

OPTIONS = (
    ("grpc.max_receive_message_length", limits.WIRE_BYTES),
    ("grpc.max_send_message_length", limits.WIRE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.http2.write_buffer_size", limits.FRAME_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
)


_OF_ITS_OWN = "Internal error from Core"
"""gRPC's text where it finds a call at its end, before it has read why."""
_AT_ONCE = "it closed the connection at once"
_PAUSES = (0.1, 0.3, 0.6)


class Unreachable(Exception):
    """A host that no stream could be opened to; the text says why."""


class PeerGone(Unreachable):
    """No host knows of a session that is to go on: nothing listens at its address, or a host with another one."""


@dataclass
class Connection:
    """An open stream, authenticated by both ends."""

    channel: Any
    call: Any
    agreed: Agreed

    async def read(self) -> bytes | None:
        return await _frame(self.call)

    async def write(self, frame: bytes) -> None:
        import grpc

        try:
            await self.call.write(frame)
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            # The call is over. Why is what reading finds.
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


class _Closed(Unreachable):
    """A host that closed the connection at once: for good, or because strangers hold all that it has."""


async def reconnect(
    address: str, security: Security, own: Release, session: Session, taken: int, until: float, why: str
) -> Connection:
    """Another connection for a session of which so many frames were taken, before the loop's clock says `until`. Raises
    Unreachable with `why` the last one ended, or else PeerGone."""
    loop, pauses = asyncio.get_running_loop(), iter(_PAUSES)
    while (left := until - loop.time()) > 0:
        try:
            return await _connect(address, security, own, min(left, limits.CONNECT_SECONDS), session, taken)
        except PeerGone as error:
            raise PeerGone(f"{why}; {error}") from None
        except Unreachable:
            await asyncio.sleep(min(left, next(pauses, _PAUSES[-1])))
    raise Unreachable(why)


async def connect(address: str, security: Security, own: Release, timeout: float) -> Connection:
    """Raises Unreachable. A connection that is closed at once is tried again, for a second in all: a host that
    strangers have just flooded takes others once it has noticed that those are gone."""
    for pause in _PAUSES:
        try:
            return await _connect(address, security, own, timeout)
        except _Closed:
            await asyncio.sleep(pause)
    return await _connect(address, security, own, timeout)


async def _connect(
    address: str, security: Security, own: Release, timeout: float, session: Session | None = None, taken: int = 0
) -> Connection:
    import grpc

    credentials = security.channel_credentials()
    channel = (
        grpc.aio.secure_channel(address, credentials, OPTIONS)
        if credentials
        else grpc.aio.insecure_channel(address, OPTIONS)
    )
    opened = False
    try:
        call = channel.stream_stream(METHOD)()
        agreed = await asyncio.wait_for(
            _greet(call, ControllerHandshake(security.secret, own, session, taken)), timeout
        )
        opened = True
        return Connection(channel, call, agreed)
    except TimeoutError:
        raise Unreachable(f"no answer within {timeout:g} s") from None
    except (Refused, Malformed) as error:
        raise PeerGone(str(error)) from None
    except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
        text = why(error)
        kind = PeerGone if _nobody_listens(error) else _Closed if text.startswith(_AT_ONCE) else Unreachable
        raise kind(text) from None
    finally:
        if not opened:
            await channel.close()


def _nobody_listens(error: Exception) -> bool:
    """Whether the machine answers, and the host does not run there any more, or does not know this end."""
    import grpc

    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "Connection refused" in (error.details() or "")
    return error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED)


async def _greet(call: Any, handshake: ControllerHandshake) -> Agreed:
    await call.write(handshake.hello())
    await call.write(handshake.prove(await _due(call)))
    return handshake.finish(await _due(call))


async def _due(call: Any) -> bytes:
    frame = await _frame(call)
    if frame is None:
        raise Refused("it closed the connection during the handshake")
    return frame


async def _frame(call: Any) -> bytes | None:
    import grpc

    frame = await call.read()
    if frame is grpc.aio.EOF:
        return None
    assert isinstance(frame, bytes)
    return frame


def why_broken(error: Exception) -> str:
    """Why a connection ended that there was."""
    import grpc

    if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE:
        return f"the connection broke ({error.details()})"
    return why(error)


def why(error: Exception) -> str:
    """gRPC's reason for a failed call, in short."""
    import grpc

    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or type(error).__name__
    details = error.details() or error.code().name
    if details == _OF_ITS_OWN:
        return "the connection broke"
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return details
    # "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connect: Connection refused (111)"
    details = re.sub(r"^.*last error: (?:[A-Z_]+: )?(?:ipv[46]:[\[\]%.:\w]+?:\d+: )?", "", details)
    if "CERTIFICATE_VERIFY_FAILED" in details:
        cause = details.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
        return f"its certificate is not accepted: {cause}"
    if "WRONG_VERSION_NUMBER" in details:
        return "it does not use TLS"
    if "Socket closed" in details or "recvmsg" in details:
        return f"{_AT_ONCE} ({details}): it does not accept this end's certificate, or uses TLS"
    return details
