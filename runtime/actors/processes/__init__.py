"""Processes that run actors, and the code that starts, watches and ends them.

Pure parts, with no I/O and no thread of their own, each tested alone:

    mailbox     Mailbox: the order in which an actor handles its messages
    ports       Ports: which replies are still to come, from where, and what happens if they cannot
    ownership   Supervision: owners, ends that follow from ends, and the owners that get a failure
    output      the output of processes, as the program prints it

And the others:

    process     one process' share of actors; instance: a running actor; current: `context()`
    faults      reports to the program of failures that processes deal with themselves
    programs    workers of programs in these processes
    host        starting, watching and ending processes; the program's own process
    spreading   messages to several processes of another host, sent once, and their answers
    agent       the same on an attached host; attached: the program's side of it
"""
