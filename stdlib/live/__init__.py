"""The live page: a running program's activity, in a browser, a notebook and a terminal.

watching    notes what happens while it is on; `snapshot()` and `stacks()`, which all three show
listening   other processes of this user ask a program for these, by a socket
serving     an HTTP server of the page, on loopback
page        monarch.dashboard: both in the program itself
terminal    monarch top
"""
