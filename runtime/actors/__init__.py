"""Actors: objects that live in processes of a mesh, and handle messages one at a time.

Pure parts, with no I/O and no thread of their own, each tested alone:

    values      ValueMesh: a value for each place of a mesh
    errors      ActorError, SupervisionError, MeshFailure
    endpoint    @endpoint, @concurrent_endpoint, and the requirements on a class of actors: `ActorInterface.of(cls)`
    adverbs     Endpoint: call, call_one, choose, broadcast, stream, shards, typed; stands on `Recipients`, as a mesh is
    accumulate  Accumulator: replies folded into one value as they come

Below them, `messages` (between processes) and `processes` (which run actors); beside them,
`debugging`. Above these:

    meshes      HostMesh, ProcMesh, ActorMesh: plain data that can be sent; channel: ports and their receivers
    actor       Actor: the base class of users' actors
    functions   monarch.remote
    shards      Shards: replies that stay where they are, for programs
    spmd        monarch.spmd: torchrun's scripts
"""
