"""Messages between processes: values as bytes, and the ways that they take.

message     values as bytes; protocol: the heads of messages; memory: large values travel in shared memory;
            sending: distributed tensors
address     the name of a process, and its host
router      sockets between the processes of a host
network     the ways to processes on other hosts; link: one such connection; order: of messages that come over several
"""
