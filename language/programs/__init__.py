"""`@monarch.program`: tracing a function, what a trace depends on and leaves behind, and calling it again."""
