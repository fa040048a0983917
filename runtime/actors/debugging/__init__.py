"""Looking at actors: breakpoints in them, and the stacks of all of them.

debugger    breakpoint() in an endpoint
console     `monarch debug`, and the same in a notebook
stacks      the stacks of every process, on request, and when a call takes too long
"""
