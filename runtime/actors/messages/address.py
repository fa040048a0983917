"""Addresses of processes: plain text, in every message.

    5f0c…e1                        on the host where the program runs: reached from there by a Unix socket
    5f0c…e1@2/10.0.0.7:40123       on host 2 of those that were attached: reached from other hosts by TCP, at that port

The name before the "@" is random, 128 bits in hex, and that of the Unix socket at which those on the same host reach
the process. The port is the host's, one for all of its processes.
"""

from __future__ import annotations

import secrets

NAME_DIGITS = 32
LONGEST = 512


def new_address(host: str = "") -> str:
    """For a process on the host that has this tag; the root's host has none."""
    name = secrets.token_hex(NAME_DIGITS // 2)
    return f"{name}@{host}" if host else name


def tag_of(number: int, host: str, port: int) -> str:
    """The tag of an attached host."""
    return f"{number}/{host}:{port}"


def name_of(address: str) -> str:
    return address[:NAME_DIGITS]


def host_of(address: str) -> str:
    """The tag of its host."""
    return address[NAME_DIGITS + 1 :]


def port_of(address: str) -> tuple[str, int]:
    """Where its host is reached: a name or an IP address, and a port."""
    where = host_of(address).partition("/")[2]
    host, _, port = where.rpartition(":")
    return host, int(port)
