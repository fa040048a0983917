"""From C++ source to a shared object, once a host: built objects are on disk under the hash of all that they depend on.

The key is made of the source (or of all that it is written from, so that it need not be written to find out that its
object is there), the flags, the compiler's file and this host's processor, so that an object built for
another processor (a home folder shared by unlike hosts) or by another compiler is never loaded. An object appears under
its name all at once, by a rename, with a digest behind it; one that does not have its digest (a full disk, a crash,
another's file) is built again. Processes that build the same one at the same time each rename theirs, and all are the
same. Objects are code: the folder belongs to the user and nobody else can enter it, or it is not used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.compiler.config import settings
from monarch.compiler.execution.events import say
from monarch.compiler.kernels.cache import BuildError, forget, is_ours, is_there, is_whole, keep, private_folder
from monarch.compiler.kernels.cpp.emit import emit, origin
from monarch.compiler.loops.text import parse_kernel

COMPILERS = ("g++", "clang++")
"""In the order of preference. Any C++17 compiler that knows these flags would do."""

FLAGS = (
    "-std=c++17 -O3 -march=native -shared -fPIC -fvisibility=hidden -fopenmp-simd -fno-math-errno -fno-trapping-math "
    # Integers wrap, as in ATen.
    "-fwrapv "
    # a * b + c keeps its two roundings, as in ATen; kernels that want one ask for it by name.
    "-ffp-contract=off"
).split()

__all__ = ["BuildError", "Compiler", "Unwritten", "build", "build_kernels", "find_compiler", "load"]


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler of this host: its path, and what tells it from another one that may stand there later."""

    path: str
    identity: str


@functools.cache
def find_compiler() -> Compiler | None:
    """The C++ compiler of this host; None where there is none."""
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            real = os.path.realpath(path)
            about = os.stat(real)
            return Compiler(path, f"{real} {about.st_size} {about.st_mtime_ns}")
    return None


@dataclass(frozen=True)
class Unwritten:
    """A source that is written only if its object is not there; it depends on nothing but `origin`."""

    origin: str
    write: Callable[[], str]


def build(source: str | Unwritten, compiler: Compiler, folder: Path | None = None) -> Path:
    """The shared object of a source, from the cache or freshly built.

    `folder` is the cache, by default the setting's. Raises BuildError, with the compiler's words.
    """
    folder = private_folder(folder or "kernels")
    target = folder / f"{_key(source if isinstance(source, str) else source.origin, compiler)}.so"
    if is_there(target) and is_whole(target):
        return target
    forget(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as work:
        text, made = Path(work, "kernels.cpp"), Path(work, "kernels.so")
        text.write_text(source if isinstance(source, str) else source.write())
        run([compiler.path, *FLAGS, "-o", str(made), str(text)])
        os.chmod(made, 0o700)
        keep(made, target)
    return target


@functools.lru_cache(maxsize=1024)
def load(path: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """A built object, loaded; a `ctypes.PyDLL` if it works on Python's objects. Raises BuildError unless it and its
    folder are such that only the user can have written it, and it is whole: its code is run, and a truncated object
    would end the process."""
    private_folder(path.parent)
    if not is_ours(path) or not is_whole(path):
        raise BuildError(f"{path} is no kernel that was built here")
    return kind(str(path))


def _key(source: str, compiler: Compiler) -> str:
    digest = hashlib.sha256()
    for part in (source, " ".join(FLAGS), compiler.identity, processor()):
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


@functools.cache
def processor() -> str:
    """The processor that -march=native means: the first one's model and features, by the kernel's report."""
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return " ".join(os.uname())
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].strip(" :") in names)


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=settings.compiler_timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{command[0]} does not compile a kernel:\n{done.stderr.strip()[:2000]}")


def build_kernels(texts: Sequence[str]) -> Path | None:
    """One shared object with all the kernels, from the cache or freshly built; None where none can be built, with one
    line about it on standard error."""
    if not texts:
        return None
    compiler = find_compiler()
    if compiler is None:
        say_once(
            "no C++ compiler is found (g++ or clang++), so kernels run as separate torch ops.\n"
            "  On Debian and Ubuntu: apt-get install g++"
        )
        return None
    try:
        kernels = [parse_kernel(text) for text in dict.fromkeys(texts)]
        return build(Unwritten(origin(kernels), lambda: emit(kernels)), compiler)
    except BuildError as error:
        say_once(f"kernels cannot be built, so they run as separate torch ops.\n{error}")
        return None


@functools.cache
def say_once(text: str) -> None:
    say("kernels", text)
