"""Reads that no name in the code shows, and state that C code keeps: a change of either is seen at the next call."""

from __future__ import annotations

import builtins
import copy
import ctypes
import dataclasses
import functools
import gc
import importlib
import logging
import math
import multiprocessing
import operator
import pickle
import random
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, module_to_mesh, program
from monarch.language.errors import TracedAgainWarning

Case = tuple[Callable[[], float], Callable[[int], Any]]
"""What a program reads, and what changes it behind call number i."""


def a_number_of_c() -> Case:
    held = ctypes.c_double(1.0)
    return lambda: held.value, lambda i: setattr(held, "value", i)


def shared_memory() -> Case:
    held = multiprocessing.Value("d", 1.0)
    return lambda: held.value, lambda i: setattr(held, "value", i)


def a_mapped_file(path: Any) -> Case:
    held = np.memmap(path / "numbers", dtype=np.float32, mode="w+", shape=(4,))
    return lambda: float(held[0]), lambda i: held.__setitem__(0, i)


def records() -> Case:
    held = np.array([(1.0,)], dtype=[("k", "f4")]).view(np.recarray)
    return lambda: float(held.k[0]), lambda i: held.k.__setitem__(0, i)


def one_record() -> Case:
    held = np.array([(1.0,)], dtype=[("k", "f4")])[0]
    return lambda: float(held["k"]), lambda i: held.__setitem__("k", i)


def masked_numbers() -> Case:
    held = np.ma.array([1.0, 2.0], mask=[0, 1])
    return lambda: float(held.sum()), lambda i: held.__setitem__(0, i)


def an_array_of_one_s_own_class() -> Case:
    class Array(np.ndarray):
        pass

    held = np.ones(2).view(Array)
    return lambda: float(held[0]), lambda i: held.__setitem__(0, i)


def a_polynomial() -> Case:
    held = np.poly1d([1.0, 2.0])
    return lambda: float(held(2.0)), lambda i: held.coeffs.__setitem__(0, i)


def a_generator_of_one_s_own_class() -> Case:
    class Random(random.Random):
        pass

    held = Random(0)
    return held.random, lambda i: None


def a_thread_s_own() -> Case:
    class Local(threading.local):
        scale = 1.0

    held = Local()
    return lambda: held.scale, lambda i: setattr(held, "scale", i)


def an_exception_s_arguments() -> Case:
    class Stop(Exception):
        pass

    held = Stop(1.0)
    return lambda: held.args[0], lambda i: setattr(held, "args", (i,))


def a_weak_proxy_of_a_dict() -> Case:
    class Dict(dict):
        pass

    held = Dict(k=1.0)
    proxy = weakref.proxy(held)
    return lambda: proxy["k"], lambda i: held.update(k=i)


def a_plain_tensor_s_data() -> Case:
    held = torch.ones(4)
    return lambda: held, lambda i: held.data.fill_(i)


def a_plain_tensor_s_memory() -> Case:
    held = torch.ones(4).share_memory_()
    return lambda: held, lambda i: held.untyped_storage().copy_(torch.full((4,), float(i)).untyped_storage())


def a_large_tensor_s_data() -> Case:
    held = torch.ones(2**17, 4)
    return lambda: held[:, None].amax(0)[0] + held, lambda i: held.data.fill_(i)


def a_strided_tensor_s_data() -> Case:
    held = torch.ones(4, 3).t()
    return lambda: held, lambda i: held.data.fill_(i)


def a_model_of_pydantic() -> Case:
    held = pydantic.create_model("Config", inner=(float, 1.0))()
    return lambda: sum(held.model_dump().values()), lambda i: setattr(held, "inner", float(i))


def getattr_by_another_name() -> Case:
    held, get, name = types.SimpleNamespace(inner=1.0), getattr, ["inn" + "er"]
    return lambda: get(held, name[0]), lambda i: setattr(held, "inner", i)


def a_getter_made_elsewhere() -> Case:
    held, get = types.SimpleNamespace(inner=1.0), operator.attrgetter("inner")
    return lambda: get(held), lambda i: setattr(held, "inner", i)


def a_format() -> Case:
    held = types.SimpleNamespace(inner=1.0)
    return lambda: float("{.inner}".format(held)), lambda i: setattr(held, "inner", i)  # noqa: UP032


def equal_namespaces() -> Case:
    held, other = types.SimpleNamespace(inner=0), types.SimpleNamespace(inner=2)
    return lambda: float(held == other), lambda i: setattr(held, "inner", i)


def a_namespace_as_text() -> Case:
    held = types.SimpleNamespace(inner=0)
    return lambda: len(repr(held)), lambda i: setattr(held, "inner", 10**i)


def a_logger_s_own_attribute() -> Case:
    log: Any = logging.getLogger("of a program")
    log.held, log.count = types.SimpleNamespace(rate=1.0), 0
    return lambda: log.held.rate + log.count, lambda i: (setattr(log.held, "rate", i), setattr(log, "count", i % 2))


def a_pickle() -> Case:
    held, dump = types.SimpleNamespace(inner=0), pickle.dumps
    return lambda: len(dump(held)), lambda i: setattr(held, "inner", 1000**i)


def dataclass_as_a_tuple() -> Case:
    @dataclasses.dataclass
    class Config:
        inner: float = 1.0

    held, parts = Config(), dataclasses.astuple
    return lambda: sum(parts(held)), lambda i: setattr(held, "inner", i)


def a_builtin_of_one_s_own() -> Case:
    builtins.monarch_scale = 1.0  # type: ignore[attr-defined]
    return lambda: monarch_scale, lambda i: setattr(builtins, "monarch_scale", i)  # type: ignore[name-defined]


def annotations() -> Case:
    def held(a: int) -> None:
        pass

    return lambda: len(held.__annotations__), lambda i: held.__annotations__.update({f"b{i}": int})


def a_logger_s_handlers() -> Case:
    held = logging.Logger("of a test")
    return lambda: len(held.handlers), lambda i: held.addHandler(logging.NullHandler())


def whether_a_logger_propagates() -> Case:
    held = logging.Logger("of a test")
    return lambda: held.propagate, lambda i: setattr(held, "propagate", not held.propagate)


def a_module_in_a_dict() -> Case:
    module = types.ModuleType("settings")
    module.inner = types.ModuleType("settings.inner")  # type: ignore[attr-defined]
    module.inner.scale = 1.0
    held = {"settings": module}
    return lambda: held["settings"].inner.scale, lambda i: setattr(module.inner, "scale", i)


def a_module_by_computed_names() -> Case:
    module = types.ModuleType("settings")
    module.inner = 1.0  # type: ignore[attr-defined]
    name = ["inn" + "er"]
    return lambda: getattr(module, name[0]), lambda i: setattr(module, "inner", i)


settings = types.ModuleType("settings of a user")


def a_name_that_a_module_has_not_yet() -> Case:
    vars(settings).pop("later", None)
    return lambda: getattr(settings, "later", 7.0), lambda i: setattr(settings, "later", i)


def an_attribute_that_a_module_has_not_yet() -> Case:
    vars(settings).pop("added", None)

    def read() -> float:
        try:
            return settings.added  # type: ignore[no-any-return]
        except AttributeError:
            return 7.0

    return read, lambda i: setattr(settings, "added", i)


def a_global_module_by_computed_names() -> Case:
    settings.inner = 1.0  # type: ignore[attr-defined]
    return lambda: sum(getattr(settings, name) for name in dir(settings) if name == "inner"), lambda i: setattr(
        settings, "inner", i
    )


CASES = [
    a_name_that_a_module_has_not_yet,
    an_attribute_that_a_module_has_not_yet,
    a_global_module_by_computed_names,
    a_number_of_c,
    shared_memory,
    a_mapped_file,
    records,
    one_record,
    masked_numbers,
    an_array_of_one_s_own_class,
    a_polynomial,
    a_generator_of_one_s_own_class,
    a_thread_s_own,
    an_exception_s_arguments,
    a_weak_proxy_of_a_dict,
    a_plain_tensor_s_data,
    a_plain_tensor_s_memory,
    a_large_tensor_s_data,
    a_strided_tensor_s_data,
    a_model_of_pydantic,
    getattr_by_another_name,
    a_getter_made_elsewhere,
    a_format,
    equal_namespaces,
    a_namespace_as_text,
    a_logger_s_own_attribute,
    a_pickle,
    dataclass_as_a_tuple,
    a_builtin_of_one_s_own,
    annotations,
    a_logger_s_handlers,
    whether_a_logger_propagates,
    a_module_in_a_dict,
    a_module_by_computed_names,
]


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_is_seen_at_the_next_call(case: Callable[..., Case], mesh: Mesh, tmp_path: Any) -> None:
    made = functools.partial(case, tmp_path) if case.__code__.co_argcount else case
    (theirs, change_theirs), (ours, change_ours) = made(), made()
    step = program(lambda x: x * ours(), mesh=mesh)
    x = distribute(torch.ones(4), mesh)
    for call in range(5):
        expected = torch.ones(4) * theirs()
        assert torch.equal(step(x).full_tensor(), expected), call
        change_theirs(call)
        change_ours(call)


class Lazy(types.ModuleType):
    """As a package's that loads its parts when they are first asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("math"), name)


def test_what_an_installed_package_loads_is_not_read_at_each_call(mesh: Mesh) -> None:
    package = Lazy("package")
    package.__file__ = np.__file__
    step = program(
        lambda x: x * (package.tau if hasattr(package, "pi") and not hasattr(package, "no") else 1), mesh=mesh
    )
    x = distribute(torch.ones(4), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TracedAgainWarning)
        for _ in range(3):
            assert step(x).full_tensor().tolist() == pytest.approx([math.tau] * 4)


@pytest.mark.parametrize("view", [torch.t, torch.conj, lambda w: torch._neg_view(w)])
def test_a_plain_tensor_that_reads_its_memory_in_another_way(mesh: Mesh, view: Callable[..., torch.Tensor]) -> None:
    weight = torch.arange(4.0).view(2, 2) + 1j * torch.ones(2, 2)
    step = program(lambda x: x.sum() * weight, mesh=mesh)
    x = torch.ones(2)
    for call in range(6):
        if call == 4:
            weight.data = view(weight.data)
        assert step(distribute(x, mesh)).full_tensor().tolist() == (x.sum() * weight).tolist()


def test_a_plain_tensor_s_data_outside_of_programs(mesh: Mesh) -> None:
    x, array = distribute(torch.ones(4), mesh), np.ones(4, dtype=np.float32)
    mask = torch.from_numpy(array)
    first = x * mask
    array[:] = 2
    second = x * mask
    mask.data.fill_(3)
    third = x * mask
    assert [y.full_tensor()[0].item() for y in (first, second, third)] == [1, 2, 3]


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def test_hooks_of_gradients_come_and_go(mesh: Mesh) -> None:
    weight = distribute(torch.ones(4), mesh).requires_grad_()
    plain = torch.ones(4, requires_grad=True)

    def step() -> None:
        (weight * 2).sum().backward()

    traced, handles = program(step, mesh=mesh), []
    for call in range(5):
        traced()
        (plain * 2).sum().backward()
        assert torch.equal(weight.grad.full_tensor(), plain.grad), call
        if call == 1:
            handles = [each.register_post_accumulate_grad_hook(halve) for each in (weight, plain)]
        if call == 3:
            for handle in handles:
                handle.remove()


def test_a_state_that_is_returned_too_is_read_without_history(mesh: Mesh) -> None:
    cell = torch.nn.GRUCell(4, 4)
    ours = module_to_mesh(copy.deepcopy(cell), mesh, {})

    def steps(cell: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        state: dict[str, torch.Tensor | None] = {"h": None}

        def step(x: torch.Tensor) -> torch.Tensor:
            h = cell(x, state["h"])
            state["h"] = h.detach()
            return h

        return step

    traced, plain = program(steps(ours), mesh=mesh), steps(cell)
    for call in range(4):
        x = torch.full((3, 4), float(call))
        torch.testing.assert_close(traced(x).full_tensor(), plain(x).detach())


def test_the_seed_is_none_of_a_program_s(mesh: Mesh) -> None:
    with pytest.raises(ProgramError, match="asks for the seed of PyTorch's generator"):
        program(lambda x: x * torch.initial_seed(), mesh=mesh)(distribute(torch.ones(4), mesh))


@pytest.mark.parametrize(
    "read", [lambda: torch.get_rng_state(), lambda: torch.default_generator.get_state()], ids=["torch", "generator"]
)
def test_nor_is_the_state_but_to_set_it_again(read: Callable[[], torch.Tensor], mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    with pytest.raises(ProgramError, match=r"(?s)asks for the state of PyTorch's.*step\(x, torch.get_rng_state\(\)\)"):
        program(lambda x: x * read().sum(), mesh=mesh)(x)

    def twice(x: torch.Tensor) -> torch.Tensor:
        state = read()
        first = torch.rand(4)
        torch.set_rng_state(state)
        return x * first - torch.rand(4)

    assert program(twice, mesh=mesh)(x).tolist() == [0.0] * 4

    def forked(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            first = torch.rand(4)
        return x * first - torch.rand(4)

    assert program(forked, mesh=mesh)(x).tolist() == [0.0] * 4


finalized: list[int] = []


class Left:
    """Waits for the garbage collector."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        finalized.append(random.randint(0, 9))


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_what_the_garbage_collector_finalizes_while_a_program_is_traced_is_not_the_programs(
    mesh: Mesh, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + len([[] for _ in range(1000)])

    finalized.clear()
    gc.collect()
    before = gc.get_threshold()
    try:
        for _ in range(3):
            gc.set_threshold(10**6)
            Left()
            gc.set_threshold(500)
            assert step(torch.zeros(1)).full_tensor().item() == 1000.0
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert (len(traces), len(finalized)) == (1, 3)


def test_a_class_that_says_it_is_a_library_s_is_the_user_s(mesh: Mesh) -> None:
    class Says:
        __module__ = "torch.fx"
        rate = 1.0

        def __init__(self) -> None:
            self.scale = 1.0

    said = Says()
    step = program(lambda x: x * said.scale * said.rate, mesh=mesh)
    for scale, rate in ((1.0, 1.0), (2.0, 1.0), (2.0, 3.0), (4.0, 3.0)):
        said.scale, Says.rate = scale, rate
        assert step(torch.ones(1)).tolist() == [scale * rate]
