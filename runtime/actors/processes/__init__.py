"""Processes that run actors, and who starts, watches and ends them.

Pure parts, with no I/O and no thread of their own, each tested alone:

    mailbox     Mailbox: the order in which an actor handles what it is sent
    ports       Ports: which replies are still to come, from where, and what happens if they cannot
    ownership   Supervision: who owns what, what ends with whom, and who is told of a failure
    output      what processes print, as the program prints it

And the others:

    process     what one process has of actors; instance: a running actor; current: `context()`
    faults      how the program hears of failures that processes deal with themselves
    programs    workers of programs in these processes
    host        starting, watching and ending processes; the program's own process
    spreading   what goes to several processes of another host, once, and their answers
    agent       the same on an attached host; attached: what the program's process has to do with those
"""
