"""Telemetry: events, as rows of tables that SQL can ask (`monarch.telemetry`).

    tables      the tables and their columns
    recording   a process' events, as rows; handed on twice a second
    kept        a host's store of them: Arrow batches, the newest within a bound
    spans       monarch.actor.span and traced; meters: monarch.actor.get_meter
    asking      the rows of all hosts, asked for by the program

A process that records hands its rows to the agent of its host: on the program's host that is the program. Nothing is
kept anywhere else, and nothing goes from host to host before a program asks.
"""
