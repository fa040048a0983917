"""The heads of messages: plain tuples, for they are pickled with every message. A head starts with its kind.

`place` is where in the mesh that was messaged the receiver is: None in a mesh of one without dims, else (rank there,
names of the dims, their sizes). `reply` is the address of the answer: None, or (address, port, place), or with a number
behind it where the value is to stay here, and only its description is sent (`programs`). An `owner` is who spawned
something, and ends with it: (address, actor), the actor "" standing for the process itself.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Head: TypeAlias = tuple[Any, ...]
Place: TypeAlias = tuple[int, tuple[str, ...], tuple[int, ...]]
ReplyTo: TypeAlias = tuple[str, int, int] | tuple[str, int, int, int]
Owner: TypeAlias = tuple[str, str]

CALL = 0
"""(actor, reply, method, whether it takes the port, place) and the payload (args, kwargs)"""
REPLY = 1
"""(port, place, whether it went well) and the value, or the exception"""
SPAWN = 2
"""(actor, reply, rank, name, owner) and (mesh, `Instance.originates`, args, kwargs)"""
STOP = 3
"""(actor, reply, reason)"""
PLACE_ENDED = 4
"""(mesh, rank, reply) and the MeshFailure that it ended of, or None: to the owner's process, which answers a failure"""
ENDED = 5
"""(address, whether its last messages may be lost) and the Death of a process, to all processes"""
REFUSED = 6
"""(actor, rank) and why: a message that wants no reply was for an actor that has ended"""
LEAVE = 7
"""(reason, seconds): end the actors of this process, and then it, which is killed after so long"""
FORK = 8
"""(reply, group) and a Group, to the agent of a host"""
STOP_PROCS = 9
"""(group, reply, reason, seconds), to the agent of a host: what has not ended after so long is killed"""
CONTROLLER = 10
"""(name, reply) and (class, args, kwargs), to the root"""
STACKS = 12
"""(reply): what this process is doing"""
READY = 11
"""(reply): once the bootstrap is through"""
RELAY = 13
"""(to, from, head) and that message's payload, to one that has a way to the receiver"""
UNREACHED = 14
"""(address): there is no way to that process, to who sent it something"""
SPAWNED = 15
"""() and a Group with processes on attached hosts, to the root, before they are started"""
OUTPUT = 16
"""(whether it is standard error, line), to the root: what a process on another host has printed"""
WORK = 17
"""(mesh, reply, rank, dims, across) and two files, the mesh's memory and a socket: run a worker of a program"""
WORKED = 18
"""(mesh, rank, how): such a worker has ended; how, unless it was told to"""
DROP = 19
"""(number): what was returned for a program is not wanted"""
NUMBERED = 20
"""(number, head) and that message's payload, from a process of another host: it waits for those before it (`order`)"""
SPREAD = 21
"""(sender, token, whether replies are gathered, receivers, below) and the payload that they all get, to the agent of
another host: the address, the number and the head for each of some processes there; and the branches below in a tree of
hosts, with a token then"""
REPLIES = 22
"""(port, replies) and nothing, from the agent of another host: the place and the data for each that went well"""
TAKEN = 23
"""(sender, token): an agent and those below have spread it, to the one above, and by that at last to the sender"""
UNTAKEN = 24
"""(sender, token): some below may not have got it, likewise"""

UNSENT = 25
"""(): in the place, by number, of a message that could not be sent, for those behind it"""
LOG = 26
"""() and the fields of a log record, to the root"""
UNFIT = 27
"""(group, rank, reply) and the pickled ActorError that the bootstrap of a process raised, to the agent of its host"""
PROBE = 28
"""(port, reply, path): whether who is to give this answer waits for one itself; see `actors.processes.circles`"""

LOG_OPTIONS = 29
"""(reply, level, whether records are sent): of what this process logs"""
OUTPUT_OPTIONS = 30
"""(group, reply, whether it is printed, seconds or None): of what processes print, to the agent of a host"""
RECORD = 31
"""(process, pid, memory, seconds) and rows of telemetry, which the agent of the host keeps within these bounds"""
FLUSH = 32
"""(reply): hand on what telemetry has recorded, and answer then"""
LOOK = 34
"""(reply): what this process is doing, in few words (`Process.look`)"""
RECORDED = 33
"""(reply, number), to the agent of a host: what it keeps of telemetry behind a batch of that number"""
KNOWS = 35
"""(address, reply), to an owner's process: answer once that process is known there to have ended (`hearing`)"""
DESCENDS = 36
"""(actor, reply): whether an actor of this process was spawned by that one, or by what it has spawned, and so on"""
FAULTS = 37
"""() and a list of `Fault`, to the root: what owners in a process have heard of"""


def passed_on(head: Head) -> bool:
    """Whether who gets a message from another host only hands it on."""
    inner = head[2] if head[0] == NUMBERED else head
    return inner[0] in (SPREAD, RELAY)
