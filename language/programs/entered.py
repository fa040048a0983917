"""Which functions a trace enters, and so what Python the program may have read.

The names that entered code uses are all the names by which it can have read an attribute; code that computes names can
have read any. Functions of the user's are walked when they are entered (`Snapshot`). Some calls ask what no guard can
expect, such as the time: `Entered.unknown` says the first of them.
"""

from __future__ import annotations

import builtins
import dis
import importlib.util
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from monarch.compiler.errors import ProgramError, Source
from monarch.language.compile import collect_as_before
from monarch.language.programs.classify import kind_of
from monarch.language.programs.containers import Own
from monarch.language.programs.growing import GrowingList
from monarch.language.programs.held import MISSING, Attributes, Slots
from monarch.language.programs.kinds import Class, Tensor, is_users_own_module
from monarch.language.programs.library import Library
from monarch.language.programs.reads import FORWARDS, OF_A_NAME, Asked, Reads, asked, computes_name
from monarch.language.programs.settings import COLLECTOR, SETTINGS, Set
from monarch.language.programs.snapshot import Snapshot
from monarch.language.recorder.scalar import Scalar
from monarch.language.recorder.scalar_int import ScalarInt
from monarch.language.source import belongs_to_user, is_users_file

_UNKNOWN_MODULES = frozenset(
    "time random secrets uuid socket subprocess select asyncio queue multiprocessing shutil tempfile glob "
    "urllib http ssl numpy.random fcntl mmap resource psutil signal tracemalloc".split()
)
"""The results of functions of these modules do not follow from the state of Python's objects."""
_GENERATORS = frozenset("initial_seed get_rng_state get_state set_rng_state set_state manual_seed".split())
"""What asks for PyTorch's generator, and sets it."""
_WRAPPERS = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules of functions that stand before some of these, to be left out by torch.compile."""
_UNKNOWN_BUILTINS = {
    name: getattr(builtins, name) for name in ("open", "input", "globals", "eval", "exec", "__import__")
}
_UNKNOWN_NAMES = {
    "os": frozenset(
        "listdir stat scandir walk urandom getrandom getpid getppid getcwd exists isfile isdir access readlink "
        "times umask getloadavg cpu_count sched_getaffinity get_terminal_size popen system read statvfs fstat".split()
    ),
    "datetime": frozenset(("now", "today", "utcnow")),
    "sys": frozenset("modules stdin _getframe _current_frames getrefcount gettrace getprofile".split()),
    "threading": frozenset("active_count current_thread enumerate main_thread get_ident stack_size".split()),
    "gc": frozenset("get_objects get_referrers get_count get_stats".split()),
    "inspect": frozenset(("currentframe", "stack")),
    "traceback": frozenset(("extract_stack", "format_stack", "print_stack", "walk_stack")),
    "logging": frozenset(("getLevelName", "getHandlerNames")),
    "torch": frozenset(("load",)),
    "numpy": frozenset(("load", "loadtxt", "genfromtxt", "fromfile", "memmap")),
    "importlib": frozenset(("import_module", "reload")),
}
_GRADS, _BY_NAME = ("autograd", "func"), ("ATTR", "METHOD", "CONST")
_UNKNOWN_ATTRIBUTES = {
    "cache_info": "how often a cache was asked",
    "__subclasses__": "which classes inherit from another",
    "__globals__": "the names of another function's module",
    **dict.fromkeys(("__annotations__", "get_type_hints", "get_annotations"), "what is annotated"),
}
_FILES = frozenset("pathlib genericpath posixpath os io codecs tokenize gzip bz2 lzma zipfile tarfile".split())
"""Modules of Python's own that users ask for files."""
_ASKS = frozenset("open stat lstat listdir scandir getcwd access readlink".split())
"""What a function of such a module names that does so."""
_ANY_NAME = frozenset(
    "vars dir __dict__ __getattribute__ attrgetter methodcaller deepcopy asdict astuple getmembers __getstate__ "
    "__reduce_ex__ __slots__ fields get_field".split()
)
"""Code that uses these may read attributes that it does not name."""
_OF_ANY_OBJECT = frozenset("argparse copy dataclasses inspect pickle pprint string types typing".split())
"""Modules of Python's own some of whose functions do so with the objects that they are given."""
_TREES = "torch.utils._pytree"
"""The module whose functions take dataclasses apart that are registered with it."""
_FIELDS = re.compile(r"\{[^{}]*[.\[][^{}]*\}")
"""A field of a format that reads an attribute or an entry."""

_SYMBOL = re.compile(r"Sym(Int|Float|Bool|Node)|Scalar|GrowingList|symbolic_shapes")
"""What an error says that was raised for a symbol, where the number for which it stands would have done."""
_FORMATS = frozenset(("format", "format_map"))
_SHOWS = frozenset(("repr", "str", "format"))
_COMPARES = frozenset("count index remove eq ne hash set frozenset".split())
_IDENTIFIES = frozenset(("id", "is_", "is_not"))
_PATTERNS = "__match_args__"
_OF_GLOBALS = frozenset("LOAD_GLOBAL STORE_GLOBAL DELETE_GLOBAL LOAD_NAME STORE_NAME DELETE_NAME".split())

_LIBRARIES = frozenset(
    "monarch numpy sympy mpmath typing_extensions packaging setuptools _distutils_hack networkx jinja2 einops "
    "lark hypothesis pytest _pytest pluggy coverage pydevd debugpy".split()
)
"""Installed packages whose functions are taken as PyTorch's are: what they do follows from what they get. (`monarch`
loads names when they are first used; Lark parses layouts, and its grammar has thousands of objects.)"""


@dataclass(frozen=True)
class _Code:
    """What is known of a code object."""

    names: tuple[str, ...]
    globals: tuple[str, ...]
    texts: tuple[str, ...]
    computes: bool
    shows: bool
    """Whether it may make text of objects, which for namespaces is C code."""
    compares: bool
    """Whether it may ask whether objects are equal."""
    identifies: tuple[tuple[str, ...], ...]
    """With what it compares objects by `is`: the names of a global and its attributes, or () for another expression."""
    users: bool
    imports: tuple[tuple[str, int, tuple[str, ...]], ...]
    """What it imports: module, level and names."""
    types: dict[int, str]
    """The lines that ask for a type, and the variable whose it is ("" for another expression)."""
    asked: Asked
    """What it asks objects for, where it is the user's."""


_codes: dict[int, tuple[CodeType, _Code]] = {}


def _look(code: CodeType, names: dict[str, Any]) -> _Code:
    known = _codes.get(id(code))
    if known is not None:
        return known[1]
    users = belongs_to_user(code) and str(names.get("__name__")).partition(".")[0] not in _LIBRARIES
    if users and code.co_filename.startswith("<") and "__file__" in names:
        users = is_users_file(names["__file__"])  # made from text by the module whose globals it has
    texts = tuple(constant for constant in code.co_consts if type(constant) is str) + tuple(
        text for constant in code.co_consts if type(constant) is tuple for text in constant if type(text) is str
    )
    if not _FORMATS.isdisjoint(code.co_names):
        texts += tuple(name for text in texts for found in _FIELDS.findall(text) for name in re.findall(r"\w+", found))
    loaded: tuple[str, ...] = ()
    computes = shows = compares = False
    identifies: tuple[tuple[str, ...], ...] = ()
    types: dict[int, str] = {}
    imports: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    asks, asked_names = Asked(), code.co_names
    if users:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        imports = tuple(_imports(steps))
        types = _asked_types(steps)
        asks = asked(steps, texts, code.co_names)
        loaded = tuple(dict.fromkeys(str(step.argval) for step in steps if step.opname in _OF_GLOBALS))
        computes = not _ANY_NAME.isdisjoint(code.co_names) or computes_name(steps) or _formats(steps)
        shows = not _SHOWS.isdisjoint(code.co_names) or any(
            step.opname.startswith("FORMAT_") or (step.opname == "BINARY_OP" and step.argrepr == "%") for step in steps
        )
        compares = not _COMPARES.isdisjoint(code.co_names) or any(
            step.opname in ("CONTAINS_OP", "BUILD_SET", "SET_ADD")
            or (step.opname == "COMPARE_OP" and any(each in str(step.argval) for each in ("==", "!=")))
            for step in steps
        )
        identifies = tuple(_identified(code, steps))
        if any(step.opname == "MATCH_CLASS" and step.arg for step in steps):  # a class pattern with positions
            asked_names += (_PATTERNS,)
    elif str(names.get("__name__")).partition(".")[0] in _OF_ANY_OBJECT:
        computes = code.co_name in _ANY_NAME or not _ANY_NAME.isdisjoint(code.co_names)
    elif names.get("__name__") == _TREES and "getattr" in code.co_names:
        computes = computes_name([step for step in dis.get_instructions(code) if step.opname != "CACHE"])
    found = _Code(asked_names, loaded, texts, computes, shows, compares, identifies, users, imports, types, asks)
    _codes[id(code)] = code, found  # kept, so that no other code takes its id
    return found


def _formats(steps: list[dis.Instruction]) -> bool:
    """Whether a text that is no constant of the code may say which attributes are shown."""
    return any(
        step.argval in _FORMATS and step.opname.endswith(("_ATTR", "_METHOD")) and before.opname != "LOAD_CONST"
        for before, step in itertools.pairwise(steps)
    )


def _imports(steps: list[dis.Instruction]) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    for at, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level, names = (each.argval for each in steps[at - 2 : at])
            yield step.argval, level, names or ()


def _identified(code: CodeType, steps: list[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    """The second operands of `is`, but constants, as `_Code.identifies` has them; `id` and `operator.is_` ask too."""
    if not _IDENTIFIES.isdisjoint(code.co_names):
        yield ()
    for at, step in enumerate(steps):
        if step.opname != "IS_OP" or steps[at - 1].opname == "LOAD_CONST":
            continue
        start = at - 1
        while steps[start].opname == "LOAD_ATTR":
            start -= 1
        is_global = steps[start].opname in ("LOAD_GLOBAL", "LOAD_NAME")
        yield tuple(str(each.argval) for each in steps[start:at]) if is_global else ()


def _asked_types(steps: list[dis.Instruction]) -> dict[int, str]:
    """The lines of code that call `type` with one argument, and the variable that it is, if it is one."""
    found: dict[int, str] = {}
    steps = [step for step in steps if step.opname not in ("PRECALL", "PUSH_NULL")]
    for at, step in enumerate(steps):
        if step.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or step.argval != "type" or step.positions is None:
            continue
        after = [each.opname for each in steps[at + 1 : at + 3]]
        if after[-1] == "CALL" and after[0].startswith("LOAD_") and isinstance(steps[at + 1].argval, str):
            name = str(steps[at + 1].argval)
        elif any(each.opname == "CALL" for each in steps[at + 1 : at + 8]) and not after[0].startswith(_NO_OPERAND):
            name = ""
        else:
            continue
        line = step.positions.lineno or 0
        found[line] = name if found.get(line, name) == name else ""
    return found


_NO_OPERAND = ("CALL", "LOAD_ATTR", "LOAD_METHOD", "STORE", "RETURN", "BUILD", "COMPARE", "IS_OP")
"""What follows a `type` that is passed on, and not called."""


class Entered:
    """The functions that a trace has entered so far."""

    def __init__(self, snapshot: Snapshot, scalars: bool, named: bool = False, numbers: bool = False) -> None:
        """`scalars` says whether arguments are floats that the trace has symbols for, `named` whether sizes are, and
        `numbers` whether numbers that it reads in Python are."""
        self.snapshot = snapshot
        self.asks_type = False
        """Whether the code may have asked for the type of such a number, or given one to what takes only Python's."""
        self.handled: str | None = None
        """An error of code that takes no symbols, which the program may have handled."""
        self._scalars = scalars or numbers
        self._symbolic = scalars or named or numbers
        self._numbers = numbers
        self._asking: dict[int, dict[int, str]] = {}
        """The lines of the code entered that ask for types, by the code's id."""
        self.codes: list[CodeType] = []
        """The user's code that was entered."""
        self.met: dict[int, dict[str, Any]] = {}
        self.attributes: set[str] = set()
        self.reads = Reads()
        self._handing: set[int] = set()
        """The code, by id, that hands objects of the user's to functions of libraries."""
        self.reads_grad = False
        """Whether the user's own code may have read a gradient."""
        self.computes = self.shows = self.compares = False
        self.identifies = False
        """Whether the program may have asked which tuple, partial, bound method or tensor a place has."""
        self.asks_which = False
        """Whether it may have asked which object an argument is."""
        self.unknown: tuple[str, Source | None] | None = None
        self.library = Library()
        self.generator: dict[str, Source] = {}
        """Where the program asks for the seed or the state of PyTorch's generator, which are others while it is traced,
        or sets it, by the function's name."""
        self._not_yet: list[tuple[CodeType, _Code, str, Sequence[str]]] = []
        self._importing: Any = None
        """How Python imports the module whose code runs now, for the first time in this process."""
        self._finding: FrameType | None = None
        """The `__getattr__` of an installed package's module that runs now: it finds what the package has, and what it
        reads and imports for that is none of a program's doing."""
        self._before: Any = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice each function that this thread enters. A debugger's or coverage's own tracing goes on."""
        self._before = sys.gettrace()
        try:
            sys.settrace(self._enter)
            yield
        finally:
            sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self._importing is not None and not self._importing._initializing:
            self._importing = None
        if code.co_name == "<module>" and self._importing is None:
            self._importing = _importing(frame.f_globals)
        if self._finding is not None:
            return None
        if code.co_name == "__getattr__" and self._before is None and _finds_names(frame):
            self._finding = frame
            return self._at_end
        if self._importing is not None:
            return None if self._before is None else self._before(frame, event, argument)
        if id(code) not in self.met or self.met[id(code)] is not frame.f_globals:
            self.meet(frame)
        if frame.f_back is not None and id(frame.f_back.f_code) in self._handing and id(code) not in self._handing:
            self.reads.give(frame)
        asks = self._asking.get(id(code))
        if self._before is not None:
            self.asks_type = self.asks_type or asks is not None
            local = self._before(frame, event, argument)
            return self._with(local) if self._symbolic and local is not None else local
        if asks is not None:
            return self._at_line
        if not self._symbolic or not (self._numbers or belongs_to_user(code)):
            return None
        frame.f_trace_lines = False
        return self._at_error if belongs_to_user(code) else self._at_librarys_error

    def _at_end(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._finding = None
        return self._at_end

    def _at_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = self._asking[id(frame.f_code)].get(frame.f_lineno) if event == "line" else None
        if name is not None and (not name or type(frame.f_locals.get(name)) in (Scalar, ScalarInt, GrowingList)):
            self.asks_type = True
        self._at_error(frame, event, argument)
        return self._at_line

    def _at_error(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception" and _SYMBOL.search(f"{argument[0].__module__} {argument[1]}"):
            self.asks_type = self.asks_type or self._scalars
            self.handled = str(argument[1])
        return self._at_error

    def _at_librarys_error(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Note an error of a library that takes no stand-in for a number or a list, and may handle it."""
        if event == "exception" and any(kind.__name__ in str(argument[1]) for kind in (ScalarInt, GrowingList)):
            self.asks_type = True
        return self._at_librarys_error

    def _with(self, local: Any) -> Any:
        """What a debugger wants to be told in a frame, and what we do."""

        def at(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal local
            self._at_error(frame, event, argument)
            local = None if local is None else local(frame, event, argument)
            return at

        return at

    def meet(self, frame: FrameType) -> None:
        code = frame.f_code
        self.met[id(code)] = frame.f_globals
        known = _look(code, frame.f_globals)
        if not known.users:
            self._of_library(code, known, frame)
            return
        self.codes.append(code)
        self._handing.add(id(code))
        self.reads.enter(known.asked)
        self.reads_grad = self.reads_grad or known.computes or "grad" in known.names or "grad" in known.texts
        if self._scalars and known.types:
            self._asking[id(code)] = known.types
        self.attributes.update(known.names, known.texts)
        self.computes = self.computes or known.computes
        self.shows = self.shows or known.shows
        self.compares = self.compares or known.compares
        self.asks_which = self.asks_which or bool(known.identifies)
        self.identifies = self.identifies or any(_may_be_tuple(frame, names) for names in known.identifies)
        names = (*known.names, *filter(str.isidentifier, known.texts))
        self.library.names(names)
        self.snapshot.enter(names)
        self.snapshot.names(frame.f_globals, known.globals, known.names)
        builtin = [name for name in known.globals if name not in frame.f_globals and name not in OF_A_NAME]
        self.snapshot.names(frame.f_builtins, builtin, ())
        if "default_generator" in known.names:
            for name in _GENERATORS.intersection(known.names):
                self.generator.setdefault(name, line_of(code, name))
        if "globals" in known.globals and "globals" not in frame.f_globals:
            self.snapshot.visit(frame.f_globals)  # as data too: names that the program adds are taken back
        self._settings(known, frame.f_globals)
        self._imported(code, known, frame.f_globals)
        self._unknown(code, known, frame.f_globals)

    def _settings(self, known: _Code, names: dict[str, Any]) -> None:
        """Note the settings on which depends what code calls."""
        values = [names.get(name) for name in known.globals]
        modules = {value.__name__ for value in values if isinstance(value, ModuleType)}
        if "gc" in modules or any(getattr(value, "__module__", "") == "gc" for value in values):
            collect_as_before()
            self.snapshot.note(Set(COLLECTOR))
        for setting in SETTINGS:
            if not (setting.names.isdisjoint(known.names) and setting.names.isdisjoint(modules)):
                self.snapshot.note(Set(setting))
        if "warnings" in modules:
            self.snapshot.names(vars(warnings), ("filters",), ())
        if "logging" in modules:
            self.snapshot.names(vars(logging), ("root",), ())

    def _imported(self, code: CodeType, known: _Code, names: dict[str, Any]) -> None:
        """Note what the modules have that code imports while it runs."""
        for name, level, wanted in known.imports:
            if level:
                name = importlib.util.resolve_name("." * level + name, names.get("__package__") or "")
            if not self._import(code, known, name, wanted):
                self._not_yet.append((code, known, name, wanted))

    def _import(self, code: CodeType, known: _Code, name: str, wanted: Sequence[str]) -> bool:
        module = sys.modules.get(name)
        if module is None:
            return False
        self.snapshot.names(sys.modules, (name,), known.names)
        for value in (module, *(getattr(module, each, None) for each in wanted)):
            what = _unknown_value(value, known.names)
            if what is not None and self.unknown is None:
                self.unknown = what, line_of(code, name)
        return True

    def note_imports(self) -> None:
        """Note the modules that the code has imported for the first time. Of those that are still not there it has read
        nothing: it stopped before, or went another way."""
        for late in self._not_yet:
            self._import(*late)
        self.computes = self.computes or self.snapshot.computes
        if self.computes:
            self.snapshot.compute()
        if _PATTERNS in self.attributes:
            self._note_patterns()

    def _note_patterns(self) -> None:
        """Note the attributes that patterns of classes may have matched by position."""
        for held in self.snapshot.held.values():
            if isinstance(held, Class):
                names = held.get(held.holder, _PATTERNS)
                if type(names) is tuple:
                    self.attributes.update(names)
                    self.reads.by_position(names)

    def _of_library(self, code: CodeType, known: _Code, frame: FrameType) -> None:
        self.attributes.update(known.names, known.texts)
        self.reads.of_library((*known.names, *known.texts))
        self.library.enter(code, frame.f_globals)
        module = frame.f_globals.get("__name__", "")
        if module in FORWARDS:
            self._handing.add(id(code))
        if module == "torch.nn.utils.parametrize":  # within its `cached()`, weights that are computed are kept
            self.snapshot.names(frame.f_globals, ("_cache_enabled", "_cache"), ())
        caller = frame.f_back
        copies = module == "copy" and code.co_name == "copy"
        if known.computes or copies:
            del self.met[id(code)]  # our own code calls it too
            while caller is not None and _takes_any(caller.f_globals):
                caller = caller.f_back
            if caller is not None and belongs_to_user(caller.f_code):
                self.computes = self.computes or not copies or kind_of(frame.f_locals["x"]) in (Attributes, Slots, Own)
        if module == "torch.random" and code.co_name in _GENERATORS and caller is not None:
            del self.met[id(code)]  # PyTorch's own code calls it too
            while caller.f_globals.get("__name__") in _WRAPPERS and caller.f_back is not None:
                caller = caller.f_back
            if belongs_to_user(caller.f_code):
                self.generator.setdefault(code.co_name, Source(caller.f_code.co_filename, caller.f_lineno))
        if self._scalars and module.partition(".")[0] == "json":  # its C code knows floats alone
            self.asks_type = True
        if module in _UNKNOWN_MODULES:
            self._say(f"{module}.{code.co_name}", frame.f_back)
        elif module.partition(".")[0] in _FILES:
            if "environ" in known.names:
                self.snapshot.names(vars(os), ("environ",), ())
            if not _ASKS.isdisjoint(known.names):
                del self.met[id(code)]  # our own code calls it too
                while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] in _FILES:
                    caller = caller.f_back
                if caller is not None and belongs_to_user(caller.f_code):
                    self._say(f"{module}.{code.co_name}", caller)

    def _say(self, what: str, frame: FrameType | None) -> None:
        while frame is not None and not belongs_to_user(frame.f_code):
            frame = frame.f_back
        if frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "sympy":
            return  # it draws the order in which it asks for what it knows of named sizes
        if self.unknown is None and frame is not None:
            self.unknown = what, Source(frame.f_code.co_filename, frame.f_lineno)

    def _unknown(self, code: CodeType, known: _Code, names: dict[str, Any]) -> None:
        """Note a call whose answer no guard can expect."""
        if self.unknown is not None:
            return
        for name, told in _UNKNOWN_ATTRIBUTES.items():
            if name in known.names:
                self.unknown = told, line_of(code, name)
                return
        for name in known.globals:
            value = names.get(name, _UNKNOWN_BUILTINS.get(name))
            of_it = known.asked.of_global(name)  # `self.load` is not `torch.load`
            what = _unknown_value(value, known.names if of_it is None else tuple(of_it))
            if what is not None:
                self.unknown = what, line_of(code, name)
                return

    def check_generator(self) -> None:
        """Raise ProgramError where the program asks for the seed of PyTorch's generator, or for its state other than to
        set it again."""
        what, instead = "seed", "initial_seed"
        source = self.generator.get(instead)
        if source is None and not self.generator.keys() & {"set_rng_state", "set_state"}:
            what, instead = "state", "get_rng_state"
            source = self.generator.get(instead) or self.generator.get("get_state")
        if source is not None:
            raise ProgramError(
                f"the program asks for the {what} of PyTorch's generator",
                hint=f"while it is traced the generator has another. Ask outside, and pass the {what} as an argument:\n"
                f"step(x, torch.{instead}()).",
                source=source,
            )

    def line(self, name: str) -> Source | None:
        """Where the user's code uses a name first."""
        for code in self.codes:
            if name in code.co_names or name in code.co_freevars or name in code.co_varnames:
                return line_of(code, name)
        return None

    def attribute(self, name: str) -> Source | None:
        """Where the user's code reads or sets an attribute of this name first, of what is no module of PyTorch's."""
        for code in self.codes:
            before: object = None
            for step in dis.get_instructions(code):
                if step.argval == name and before not in _GRADS and any(kind in step.opname for kind in _BY_NAME):
                    return line_of(code, name)
                before = step.argval
        return None

    def made_by(self, code: CodeType) -> bool:
        """Whether code that was entered makes functions of this code."""
        return any(code in outer.co_consts for outer in self.codes)


def _may_be_tuple(frame: FrameType, names: tuple[str, ...]) -> bool:
    """Whether what code names may be a tensor, or compared by its parts, as tuples are: no class or function is."""
    value = frame.f_globals.get(names[0], frame.f_builtins.get(names[0], MISSING)) if names else MISSING
    for name in names[1:]:
        value = vars(value).get(name, MISSING) if isinstance(value, ModuleType) else MISSING
    kind = kind_of(value)
    return value is MISSING or not (kind is None or isinstance(kind, str) or (kind.by_identity and kind is not Tensor))


def _finds_names(frame: FrameType) -> bool:
    """Whether a frame is the `__getattr__` of an installed package's module of a class of its own."""
    variables = frame.f_code.co_varnames
    module = frame.f_locals.get(variables[0]) if variables else None
    return isinstance(module, ModuleType) and type(module) is not ModuleType and not is_users_own_module(module)


def _takes_any(names: dict[str, Any]) -> bool:
    """Whether functions with these globals may read any attribute of what they are given."""
    name = str(names.get("__name__"))
    return name == _TREES or name.partition(".")[0] in _OF_ANY_OBJECT


def _importing(names: dict[str, Any]) -> Any:
    """The import system's record of a module with these globals, where it is being imported. What its code does
    happens once in a process, and is none of a program's doing."""
    spec = names.get("__spec__")
    return spec if getattr(spec, "_initializing", False) else None


def _unknown_value(value: Any, names: tuple[str, ...]) -> str | None:
    if isinstance(value, ModuleType):
        if value.__name__ in _UNKNOWN_MODULES:
            return value.__name__
        if value.__name__ == "numpy" and "random" in names:
            return "numpy.random"
        for name in _UNKNOWN_NAMES.get(value.__name__, ()):
            if name in names:
                return f"{value.__name__}.{name}"
        return None
    if isinstance(value, BuiltinFunctionType):
        if any(value is builtin for builtin in _UNKNOWN_BUILTINS.values()):
            return f"{value.__name__}()"
        owner = getattr(value, "__self__", None)
        module = value.__module__ or type(owner).__module__
        return f"{module}.{value.__name__}" if module in _UNKNOWN_MODULES else None
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__name__}" if value.__module__ in _UNKNOWN_MODULES else None
    if isinstance(value, type) and value.__module__ == "datetime":
        return next((f"datetime.{name}" for name in _UNKNOWN_NAMES["datetime"] if name in names), None)
    return None


def line_of(code: CodeType, name: str) -> Source:
    """Where code uses a name first."""
    for step in dis.get_instructions(code):
        where = step.positions
        if step.argval == name and where is not None and where.lineno is not None:
            column = 0 if where.col_offset is None else where.col_offset + 1
            end = (
                where.end_col_offset + 1 if where.end_col_offset is not None and where.end_lineno == where.lineno else 0
            )
            return Source(code.co_filename, where.lineno, column, end)
    return Source(code.co_filename, code.co_firstlineno)
