"""What goes between processes: values as bytes, and the ways that they take.

message     values as bytes; protocol: the heads of messages; memory: what is large travels in shared memory;
            sending: distributed tensors
address     who a process is, and on which host
router      sockets between the processes of a host
network     the ways to processes on other hosts; link: one such connection; order: of what comes over several
"""
