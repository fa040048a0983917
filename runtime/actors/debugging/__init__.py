"""What actors are doing: breakpoints in them, and where all of them are.

debugger    breakpoint() in an endpoint
console     `monarch debug`, and the same in a notebook
stacks      the stacks of every process, on request, and when a call takes too long
"""
