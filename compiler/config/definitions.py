"""All settings, with their defaults: `settings.kernels`, or in the environment MONARCH_KERNELS.

Code reads a setting where it needs the value, as an attribute of `settings`. Tests compare `docs/settings.md` and the
README with these definitions.
"""

from __future__ import annotations

from monarch.compiler.config.kinds import Choice, Flag, FolderOrNone, Text, TextOrNone, Words
from monarch.compiler.config.store import Setting, SettingsBase


class Settings(SettingsBase):
    """Every setting of Monarch, by name."""

    log = Setting(
        Words("passes", "plan", "commands"),
        frozenset(),
        "What to print on standard error: passes and their times, plans, commands to the workers.",
    )
    dump = Setting(
        FolderOrNone(),
        None,
        "A folder into which the compiler writes the graph before and after each pass, with a diff.",
        local=True,
    )
    verify = Setting(Flag(), False, "Whether the compiler verifies the graph after each pass.")
    cache = Setting(
        FolderOrNone(),
        None,
        "The folder in which built kernels are kept; `~/.cache/monarch` without it.",
        local=True,
    )
    kernels = Setting(
        Choice("auto", "all", "off"),
        "auto",
        "Which ops become generated kernels: those of programs in which that saves enough time, all that can, or none.",
    )
    templates = Setting(
        Choice("auto", "all", "off"),
        "auto",
        "In plans for GPUs, which matrix products take in what follows them, and which calls templates run.",
    )
    hosts = Setting(
        Text("addresses with commas between them, or the path of a file that lists them"),
        "",
        "The hosts that `monarch.hosts()` attaches: addresses with commas between them, or the path of a file of them.",
        local=True,
    )
    tls = Setting(
        TextOrNone("the path of a folder with certificates"),
        None,
        "The folder with the certificates with which hosts are attached.",
        local=True,
    )
    token = Setting(
        TextOrNone("a token, or the path of the file that holds it"),
        None,
        "The token with which hosts are attached, or the path of the file that holds it.",
        local=True,
    )


settings = Settings()
