"""Kernels as one C++ translation unit, which a C++17 compiler builds without any header but <cstdint>.

Each kernel is a function `int64_t name(void* const* p, int64_t threads, const int64_t* given)`: `p` has the addresses
of the inputs' and then the outputs' first elements, and `given` the numbers of a sized kernel (`Sized`); it gives 0 or,
where a gather's index was out of range, 1 + the number of that statement, counted over all nests of the kernel. Its
nests run one after the other, each divided among the threads where it is large enough to pay. A result has the same
bits whatever the number of threads.

Threads are those of the OpenMP runtime that the process has already, which is torch's: it is found when the object is
loaded, by the name that GCC's and LLVM's runtimes share. A second runtime would have a second pool of threads, which
spin while they wait, on cores that the first one uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path

from monarch.compiler.kernels.cpp.nests import Function, NestWriter
from monarch.compiler.kernels.cpp.schedule import schedule
from monarch.compiler.kernels.cpp.segments import Segments
from monarch.compiler.kernels.cpp.simplify import simplify
from monarch.compiler.kernels.cpp.split import PIECES, Split, split
from monarch.compiler.loops.ir import Buffer, Kernel, Load, Nest, Store
from monarch.compiler.loops.text import print_kernel

LEAST_WORK = 1 << 17
"""Operations that a thread has to have to be worth starting: about 20 microseconds."""
_MOST_THREADS = 256
"""As many as `Job` below has room for."""

_THREADS = """
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" __attribute__((weak)) int omp_get_thread_num();
extern "C" __attribute__((weak)) int omp_get_num_threads();

static inline double number_(int64_t bits) {
    double number;
    __builtin_memcpy(&number, &bits, sizeof number);
    return number;
}

typedef int64_t (*Nest)(void* const*, const int64_t*, int64_t, int64_t);

struct Job {
    Nest nest; void* const* p; const int64_t* n; int64_t units, pieces; int64_t failed[256];
};

static void run_piece(Job* job, int64_t piece) {
    const int64_t begin = job->units * piece / job->pieces, end = job->units * (piece + 1) / job->pieces;
    job->failed[piece] = job->nest(job->p, job->n, begin, end);
}

static void run_thread(void* at) {
    Job* job = (Job*)at;
    const int64_t threads = omp_get_num_threads();
    for (int64_t piece = omp_get_thread_num(); piece < job->pieces; piece += threads) run_piece(job, piece);
}

static int64_t run(Nest nest, void* const* p, const int64_t* n, int64_t units, int64_t pieces, int64_t threads) {
    pieces = pieces < threads ? pieces : threads;
    if (pieces < 2 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return nest(p, n, 0, units);
    Job job;
    job.nest = nest; job.p = p; job.n = n; job.units = units; job.pieces = pieces;
    GOMP_parallel(run_thread, &job, (unsigned)pieces, 0);
    for (int64_t piece = 0; piece < pieces; ++piece) if (job.failed[piece]) return job.failed[piece];
    return 0;
}
"""


@dataclass(frozen=True)
class Sized:
    """The C++ of a sized kernel.

    `name`     of its function, which depends on all that it computes but sizes and strides
    `text`     of this function
    `nests`    the text of each nest that it runs, by name
    `numbers`  what it is called with: for each nest its units and pieces, the bytes in front of its pointers, and its
               sizes, strides and constants, floats as the bits of doubles
    """

    name: str
    text: str
    nests: Mapping[str, str]
    numbers: tuple[int, ...]


@lru_cache(maxsize=1024)
def sized(kernel: Kernel) -> Sized:
    """The C++ of a sized kernel."""
    parted = split(kernel)
    calls = [_Call(parted.kernel, at, False) for at in range(len(parted.origin))]
    nests: dict[str, str] = {}
    numbers: list[int] = []
    for call in calls:
        call.name = f"nest_{_digest(call.shared.text)}"
        nests[call.name] = call.shared.text
        numbers += _given(call, parted)
    body = _body(kernel, parted, calls, given=True)
    name = f"{kernel.name}_{_digest(body)}"
    return Sized(name, _HEAD.format(name=name) + body, nests, tuple(numbers))


@lru_cache(maxsize=1024)
def symbol(kernel: Kernel) -> str:
    """The name of a kernel's function, which depends on all that the kernel computes."""
    if kernel.sized:
        return sized(kernel).name
    return f"{kernel.name}_{_digest(print_kernel(kernel, lines=False))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _vector_math() -> str:
    return Path(__file__).with_name("vector_math.h").read_text()


_IN_COMMON = """\
// exp_() and its kin are those of compiler/kernels/cpp/vector_math.h; run() shares out a nest's outermost loop, in
// fixed pieces, among the threads that there are.
"""


def emit(kernels: Sequence[Kernel], *, lines: bool = False) -> str:
    """The translation unit; each kernel once. With `lines` it is for reading: each statement has its line in the user's
    program beside it, and what all kernels have in common is left out."""
    distinct = {symbol(kernel): kernel for kernel in kernels if lines or not kernel.sized}
    parted = {name: split(kernel) for name, kernel in distinct.items()}
    calls = {name: [_Call(each.kernel, at, lines) for at in range(len(each.origin))] for name, each in parted.items()}
    everything = [call for of_kernel in calls.values() for call in of_kernel]
    groups: dict[str, list[_Call]] = {}
    for call in everything:
        groups.setdefault(call.shared.text, []).append(call)
    functions: dict[str, str] = {}
    for group in groups.values():
        # Sizes that are the same everywhere are better known when the nest is compiled.
        same = len({call.shared.numbers for call in group}) == 1
        for call in group:
            call.function = call.written(shared=False) if same else call.shared
            call.name = functions.setdefault(call.function.text, f"nest{len(functions)}")
    parts = [_IN_COMMON] if lines else [_vector_math(), _THREADS]
    of_any_size = [] if lines else [sized(kernel) for kernel in kernels if kernel.sized]
    texts = {name: text for text, name in functions.items()} | {
        name: text for each in of_any_size for name, text in each.nests.items()
    }
    for name, text in texts.items():
        parts.append(
            "__attribute__((noinline)) static int64_t\n"
            f"{name}(void* const* p, const int64_t* n, int64_t begin, int64_t end) {{\n{text}}}\n"
        )
    parts += [
        _HEAD.format(name=name) + _body(distinct[name], parted[name], calls[name], given=False) for name in distinct
    ]
    parts += dict.fromkeys(each.text for each in of_any_size)
    return "\n".join(parts)


def origin(kernels: Sequence[Kernel]) -> str:
    """All that `emit` of these kernels depends on, which is found sooner than its result: the kernels, and the source
    files of this emitter."""
    written = (symbol(kernel) if kernel.sized else print_kernel(kernel, lines=False) for kernel in kernels)
    return "\n".join([writer(), *dict.fromkeys(written)])


@cache
def writer() -> str:
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*here.parent.glob("*.py"), *here.glob("*.py"), *here.glob("*.h")]):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


class _Call:
    """A nest of a kernel, and the function that it calls."""

    name: str

    def __init__(self, kernel: Kernel, at: int, lines: bool) -> None:
        nest = kernel.nests[at]
        simple = simplify(nest, kernel.dtypes[at])
        dtypes = [buffer.dtype for buffer in (*kernel.inputs, *kernel.outputs)]
        self.values = Segments(simple, schedule(simple.nest), dtypes, _overwrites(kernel, nest))
        self.lines, self.sized = lines, kernel.sized
        self.function = self.shared = self.written(shared=True)

    def written(self, *, shared: bool) -> Function:
        return NestWriter(self.values, shared=shared, constants=shared and self.sized, lines=self.lines).write()


def _overwrites(kernel: Kernel, nest: Nest) -> dict[int, frozenset[int]]:
    """For the buffer of each store, the inputs whose memory it may be given: `may_overwrite` says yes of no others that
    the nest reads."""
    loads = [s for s in nest.body if isinstance(s, Load) and s.gather < 0]
    return {
        store.buffer: frozenset(
            load.buffer
            for load in loads
            if load.index == store.index and kernel.buffer(load.buffer) == kernel.buffer(store.buffer)
        )
        for store in nest.body
        if isinstance(store, Store)
    }


_HEAD = """extern "C" __attribute__((visibility("default"))) int64_t
{name}(void* const* p, int64_t threads, const int64_t* given) {{
"""


def _given(call: _Call, parted: Split) -> list[int]:
    """The arguments of a sized kernel for one of its nests."""
    function = call.shared
    return [function.units, _pieces(function), *_offsets(function, parted), *function.numbers]


def _offsets(function: Function, parted: Split) -> list[int]:
    """The bytes in front of each pointer of a nest."""
    return [offset * parted.kernel.buffer(buffer).dtype.itemsize for buffer, offset in function.pointers]


def _pieces(function: Function) -> int:
    return max(1, min(_MOST_THREADS, function.units, int(function.units * function.cost / LEAST_WORK)))


def _body(kernel: Kernel, parted: Split, calls: Sequence[_Call], *, given: bool) -> str:
    """The body of a kernel's function; with `given`, of one that takes its sizes."""
    lines = ["    int64_t failed;"]
    homes = [f"p[{buffer}]" for buffer in range(len(kernel.inputs) + len(kernel.outputs))]
    for number, buffer in enumerate(parted.kernel.outputs[len(kernel.outputs) :]):
        room = _room(buffer) if given else buffer.nbytes
        lines.append(f"    alignas(64) static thread_local char scratch{number}[{room}];")
        homes.append(f"scratch{number}")
    bases = list(accumulate((len(nest.body) for nest in kernel.nests), initial=0))
    at = 0
    for origin, call in zip(parted.origin, calls, strict=True):
        function = call.shared if given else call.function
        offsets = _offsets(function, parted)
        if given:
            before = [f"given[{at + 2 + number}]" for number in range(len(offsets))]
        else:
            before = [str(offset) if offset else "" for offset in offsets]
        pointers = ", ".join(
            f"(char*){homes[buffer]} + {offset}" if offset else homes[buffer]
            for (buffer, _), offset in zip(function.pointers, before, strict=True)
        )
        lines.append("    {")
        lines.append(f"        void* const q[] = {{{pointers}}};")
        if given:
            numbers, shares = f"given + {at + 2 + len(offsets)}", f"given[{at}], given[{at + 1}]"
        else:
            numbers, shares = "n" if function.numbers else "nullptr", f"{function.units}, {_pieces(function)}"
            if function.numbers:
                lines.append(f"        const int64_t n[] = {{{', '.join(map(str, function.numbers))}}};")
        lines.append(f"        failed = run({call.name}, q, {numbers}, {shares}, threads);")
        lines.append(f"        if (failed) return failed + {bases[origin or 0]};")
        lines.append("    }")
        at += 2 + len(offsets) + len(function.numbers)
    return "\n".join([*lines, "    return 0;", "}", ""])


def _room(buffer: Buffer) -> int:
    """Bytes of scratch memory that also hold most other sizes, so that these have the same text."""
    most = buffer.nbytes // buffer.shape[0] * (PIECES.stop - 1)
    return int(1 << (most - 1).bit_length())
