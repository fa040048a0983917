"""All settings, with their defaults: `settings.kernels`, or in the environment MONARCH_KERNELS.

Code reads a setting where it needs the value, as an attribute of `settings`. A test compares
`docs/reference/settings.md` with these definitions.
"""

from __future__ import annotations

from monarch.compiler.config.kinds import Choice, Count, Duration, Flag, FolderOrNone, Size, Text, TextOrNone, Words
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
    full_tracebacks = Setting(
        Flag(), False, "Whether the traceback of an error in your program also has the lines of Monarch's own files."
    )
    cache = Setting(
        FolderOrNone(),
        None,
        "The folder for built kernels and compiled plans; `~/.cache/monarch` without it.",
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
        "In plans for GPUs, which matrix products fuse the ops after them, and which calls templates run.",
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
        "The folder with the certificates for attaching hosts.",
        local=True,
    )
    token = Setting(
        TextOrNone("a token, or the path of the file that holds it"),
        None,
        "The token for attaching hosts, or the path of the file that holds it.",
        local=True,
    )

    environment = Setting(
        Text("names of environment variables with commas between them"),
        "",
        "The environment variables that a program sends to processes of actors on attached hosts, which"
        " otherwise have their host's environment: names with commas between them.",
    )
    cache_keep = Setting(
        Duration("1h", "3650d"),
        30 * 86400.0,
        "How long an unused kernel stays in the cache.",
        local=True,
    )
    plan_cache = Setting(
        Size(0, 1 << 40),
        256 << 20,
        "How much disk the compiled plans of programs may take; the least recently used go first. 0 keeps none.",
        local=True,
    )
    compiler_timeout = Setting(
        Duration("1s", "1d"),
        300.0,
        "How long the C++ compiler may take over the kernels of a plan.",
        local=True,
    )
    eager_plans = Setting(
        Count(1, 1 << 20), 256, "How many plans of ops outside of programs are kept: the most recently used."
    )
    stall_warning = Setting(
        Duration("100ms", "365d"),
        60.0,
        "After how long without progress on any worker Monarch reports a mesh that has work, with the workers"
        " that have not arrived, their ops and their stacks.",
    )
    stopped_worker_timeout = Setting(
        Duration("100ms", "365d"),
        300.0,
        "How long a signal may stop a worker for which others wait, from that report on, before its mesh"
        " counts as lost. Debuggers have no such bound.",
    )
    slow_call_warning = Setting(
        Duration("100ms", "365d"),
        300.0,
        "After how long Monarch reports an unanswered call of an actor, once, with the stacks of the actors"
        " that have not answered, and a `__supervise__` that takes as long. `monarch.actor.report_slow_calls`"
        " sets it for the calls of one process.",
    )
    deadlock_check = Setting(
        Duration("100ms", "365d"),
        5.0,
        "After how long Monarch checks an actor that waits for another one's answer: if the actors wait for"
        " each other in a circle, the call fails.",
    )
    steps_ahead = Setting(
        Count(2, 1 << 16), 256, "How many commands the controller may be ahead of its workers before it waits for them."
    )
    trace_memory = Setting(
        Size(1 << 20, 1 << 40),
        256 << 20,
        "The memory for the measurements of a mesh's workers during a profile; each takes from 1 MiB to 32 MiB of it.",
    )
    live = Setting(
        Flag(),
        False,
        "Whether `monarch dashboard` and `monarch top` find a program as soon as it has workers or actors, without its"
        " calling `monarch.dashboard()`.",
        local=True,
    )
    telemetry_memory = Setting(
        Size(1 << 20, 1 << 40),
        64 << 20,
        "The most memory for each host's tables of telemetry, unless `TelemetryConfig` sets another. The"
        " oldest rows go first.",
    )
    codec_max_frame_length = Setting(
        Size(64 << 10, 1 << 50),
        16 << 30,
        "The most bytes that one message between actors may have: its arguments, or its reply.",
    )
    message_delivery_timeout = Setting(
        Duration("1s", "1d"),
        60.0,
        "How long a message from a process of actors to another host may stay unacknowledged before the"
        " connection counts as lost. A process acknowledges nothing while a C function keeps the GIL; Monarch"
        " notices a lost host sooner.",
    )
    process_exit_timeout = Setting(
        Duration("0s", "1d"),
        10.0,
        "How long processes of actors may take to end after `stop()` before they are killed: the value at the"
        " call of `stop()`, and for processes whose owner has died the value at their spawn.",
    )
    stop_actor_timeout = Setting(
        Duration("0s", "1d"),
        10.0,
        "How long a running message may delay the stop of an actor. After that the actor counts as ended, and"
        " a warning shows where it is.",
    )
    fault_exit_timeout = Setting(
        Duration("0s", "1d"),
        60.0,
        "How long the program's main thread may take to end after an unhandled failure has interrupted it.",
    )
    exit_timeout = Setting(
        Duration("0s", "1d"),
        60.0,
        "How long the program's end waits for running saves of checkpoints, for logged values and for"
        " telemetry's last export, from their last progress on. A message names the ones that it aborts.",
        local=True,
    )
    host_timeout = Setting(
        Duration("200ms", "1h"),
        30.0,
        "How long a host, or a host's controller, may be silent before it counts as lost, if `monarch.hosts`"
        " gets no `timeout`. After a shorter silence (a link that was down, Ctrl-Z, a held GIL) everything"
        " continues.",
    )
    host_reconnect = Setting(
        Duration("0s", "1h"),
        5.0,
        "How long a host and its controller wait for a new connection if theirs is reset or closed, so that"
        " nothing is lost; with 0s, not at all. The processes of a killed controller stay on its hosts that"
        " long.",
    )
    host_spawn_ready_timeout = Setting(
        Duration("1s", "1d"),
        60.0,
        "How long a host that `monarch.launch.local` starts may take until it listens.",
    )
    prefix_python_logs_with_actor = Setting(
        Flag(),
        True,
        "Whether actors' log messages have their name before them, such as `[actor=trainers[3]]`, in the"
        " program's handlers.",
    )
    tail_log_lines = Setting(
        Count(0, 100_000),
        20,
        "How many of the last output lines of a process of actors the report of its end has.",
    )


settings = Settings()
