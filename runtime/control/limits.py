"""How much of anything is taken from another machine, and the protocol's version. All bounds of this package."""

from __future__ import annotations

PROTOCOL = 3
"""Counted up whenever an older host or controller would misread the messages of a newer one."""

NONCE_BYTES = 32
SESSION_BYTES = 16
"""The name of a session."""
TOKEN_BYTES = (16, 4096)
"""The least and the most that a shared token has."""

PART_BYTES = 512 << 10
"""A message's data goes in parts of this size, between those of other messages."""
FRAME_BYTES = 1 << 20
"""A frame is closed once it holds as much data as this."""
FRAME_RECORDS = 1000
"""The beat that may go along included."""
HEAD_BYTES = 1 << 20
"""Of one message's head, as JSON."""
WIRE_BYTES = 6 << 20
"""The largest frame that gRPC takes: FRAME_BYTES and a part, FRAME_HEAD_BYTES and a head, and some."""
FRAME_HEAD_BYTES = 1 << 20
"""A frame is closed once its records' heads are as long as this, but for the last one."""
MESSAGE_BYTES = 16 << 30
"""Of one message's data."""

KIND_LETTERS = 64
NUMBERS = 64
"""In one progress message."""
TEXT_BYTES = 4096
"""Of an address, a name or a reason."""
HOSTS = 16384
HOSTS_A_RECORD = 500
FAN_OUT = 256

QUEUE_BYTES = 128 << 20
"""Bytes that wait to be sent on one stream, or for a host's service, before their sender has to wait."""
KEPT_BYTES = 32 << 20
"""Bytes of frames that an end of a stream keeps until the other end has them: then it waits for that."""
RECORD_COST = 128
"""The bytes that a record counts in a queue besides its own."""

HANDSHAKE_SECONDS = 5.0
"""Seconds for which a peer may keep a stream open before it has proved its identity."""
STREAMS = 128
"""On one host at a time, of whatever peers; gRPC refuses more."""
STRANGERS = 512
"""Connections to one host, besides those that may have a stream, where it may have many descriptors."""
TIMEOUT_SECONDS = (0.2, 3600.0)
RECONNECT_SECONDS = (0.0, 3600.0)
CONNECT_SECONDS = 1.0
"""How long one attempt to open another connection for a session takes at most, where there is time for several."""
