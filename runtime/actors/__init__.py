"""Actors: objects that live in processes of a mesh, and handle messages one at a time.

Pure parts, with no I/O and no thread of their own, each tested alone:

    shape       Extent, Point, NDSlice, Shape: strided slices of a grid
    mesh        MeshAlgebra: what every mesh can do (slice, split, flatten, rename, size, sizes, extent, to_table, len)
    values      ValueMesh: a value for each place of a mesh
    future      Future: a value that will be there, for threads and for asyncio
    errors      ActorError, SupervisionError, MeshFailure
    endpoint    @endpoint, @concurrent_endpoint, and what a class must be to be an actor: `ActorInterface.of(cls)`
    adverbs     Endpoint: call, call_one, choose, broadcast, stream, typed; it stands on `Recipients`, which a mesh is
    accumulate  Accumulator: replies folded into one value as they come
    mailbox     Mailbox: the order in which an actor handles what it is sent
    ports       Ports: which replies are still to come, from where, and what happens if they cannot
    ownership   Supervision: who owns what, what ends with whom, and who is told of a failure
    output      what processes print, as the program prints it

Processes and what goes on between them:

    message     values as bytes; protocol: the heads of messages; memory: what is large travels in shared memory
    address     who a process is, and on which host
    router      sockets between the processes of a host; network: the ways to those on others; link: one such connection
    process     what one process has of actors; instance: a running actor; current: `context()`
    host        starting, watching and ending processes; the program's own process
    agent       the same on an attached host; attached: what the program's process has to do with those
    meshes      HostMesh, ProcMesh, ActorMesh: plain data that can be sent; channel: ports and their receivers

What stands on these:

    actor       Actor: what users derive from
    functions   monarch.remote
    spmd        monarch.spmd: torchrun's scripts
    debugger    breakpoint() in an endpoint; console: `monarch debug`; stacks: where everybody is
"""
