"""Workers on this host: processes that hold tensors and run plans, driven through one shared ring of commands.

    controller ── commands, in a ring in shared memory, read by every worker ──▶ workers
        ▲──────── progress words in shared memory; failures and values over a socket each ────┘

The folders, in the order in which they build on each other:

    shared/       what two processes share: how they wait for each other, the memory, the ring, the bytes of a command
    control/      the control plane: one tree of hosts, over gRPC
    transport/    one-sided moves of bytes: shared memory, TCP, verbs, CUDA; `rdma.py` beside it is what users see
    processes/    the warm parent: it forks processes, watches them, and ends them
    collectives/  how workers meet and exchange tensors
    worker/       a plan as a Python function, and the loop that carries commands out
    controller/   what a step, a handle and a failure are; the executor of a mesh
    hosts/        meshes on several hosts: a host's service, attaching to hosts, launching them, the doctor
    actors/       actors, their messages and their processes
"""
