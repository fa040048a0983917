"""A stand-in for `worker.graphs.Recorder` on CPUs: it records calls with the very memory that they have, and replays
them there.

So it is wrong where a CUDA graph would be wrong: what is replayed reads what lies at the addresses of the recording,
and writes there. What a recording computes is not kept, as nothing is computed while a stream is captured; and before
each replay, and after it, all that the graph made for itself is overwritten, as it would be by whoever shares its
memory. What it gave is, too, once nobody holds it any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from monarch.runtime.worker import graphs
from tests.compiler.kernels.triton.standin import StandIn, carry_out

GARBAGE = 0xFF
"""In each byte: not a number in any dtype of floats, and an index out of range."""

ON_THE_HOST = frozenset({"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"})

Call = Callable[[], None]


def recording_on_cpus(monkeypatch: pytest.MonkeyPatch, driver: StandIn | None = None) -> type[OnCpus]:
    """Put one in the recorder's place, in this process and in those that are forked from it; what the stand-in for the
    driver launches is recorded too. `refused` has ops that cannot be recorded, `made` all recorders."""

    class Here(OnCpus):
        refused = ON_THE_HOST
        made: list[OnCpus] = []

        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            self.made.append(self)
            self.driver = driver

    monkeypatch.setattr(graphs, "Recorder", Here)
    return Here


class OnCpus:
    """`graphs.Recorder`."""

    refused: frozenset[str]
    made: list[OnCpus]
    driver: StandIn | None

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.warmed = 0
        self.graphs: list[Graph] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        self.warmed += 1
        yield

    def record(self, function: Callable[[], tuple[Any, ...]]) -> tuple[Call, tuple[Any, ...]]:
        graph = Graph(self.refused)
        if self.driver is not None:
            self.driver.carry_out = graph.launch
        try:
            with graph:
                given = function()
        finally:
            if self.driver is not None:
                self.driver.carry_out = carry_out
            graph.end()
        self.graphs.append(graph)
        graph.gives(given)
        return graph.replay, given


class Graph(TorchDispatchMode):
    def __init__(self, refused: frozenset[str]) -> None:
        super().__init__()
        self.replays = 0
        self._refused = refused
        self._calls: list[Call] = []
        self._own: dict[int, torch.UntypedStorage] = {}
        self._others: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._given: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in self._refused:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        read = self._seen((args, kwargs))
        made = func(*args, **kwargs)
        if str(func).startswith(("aten.empty", "aten.new_empty")):
            self._keep(made)
        elif not any(_address(tensor) in read for tensor in _tensors(made)):
            self._keep(made)
            self._calls.append(_again(func, args, kwargs, made))
        elif func._schema.is_mutable:
            self._calls.append(_again(func, args, kwargs, None))
        return made  # of a view nothing is launched

    def launch(self, kernel: Callable[[Sequence[Any]], None], arguments: Sequence[Any]) -> None:
        with _disable_current_modes():
            self._seen(arguments)
            again = partial(kernel, [_apart(each) for each in arguments])
            again()
        self._calls.append(again)

    def gives(self, value: Any) -> None:
        self._given = [(_address(tensor), weakref.ref(tensor)) for tensor in _tensors(value)]

    def end(self) -> None:
        """Undo what was computed."""
        for storage, before in self._others.values():
            storage.copy_(before)
        self._others.clear()
        for storage in self._own.values():
            _spoil(storage)

    def replay(self) -> None:
        self.replays += 1
        for storage in self._own.values():
            _spoil(storage)
        for call in self._calls:
            call()
        held = {address for address, tensor in self._given if tensor() is not None}
        for address, storage in self._own.items():
            if address not in held:
                _spoil(storage)

    def _keep(self, made: Any) -> None:
        for tensor in _tensors(made):
            self._own[_address(tensor)] = tensor.untyped_storage()

    def _seen(self, arguments: Any) -> set[int]:
        """The memory that a call is given; as it is now, where it is others'."""
        found = set()
        for tensor in _tensors(arguments):
            address = _address(tensor)
            found.add(address)
            if address not in self._own and address not in self._others:
                with _disable_current_modes():
                    self._others[address] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        return found


def _again(func: Any, args: Any, kwargs: Any, made: Any) -> Call:
    args, kwargs, made = tree_map(_apart, (args, kwargs, made))

    def call() -> None:
        found = func(*args, **kwargs)
        for place, value in zip(_tensors(made), _tensors(found), strict=True) if made is not None else ():
            place.copy_(value)

    return call


def _apart(value: Any) -> Any:
    """A tensor of its own in the same memory: what is recorded does not keep the program's alive."""
    return value.as_strided(value.size(), value.stride(), value.storage_offset()) if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if _is_tensor(leaf)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(storage: torch.UntypedStorage) -> None:
    torch.tensor([], dtype=torch.uint8).set_(storage).fill_(GARBAGE)  # type: ignore[call-overload]
