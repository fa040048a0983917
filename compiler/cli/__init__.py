"""`monarchc`, the command line: one file for each command."""

from monarch.compiler.cli.app import main

__all__ = ["main"]
