"""Ops outside of programs: recorded, and run as an implicit program when a value is needed."""
