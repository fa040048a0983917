"""Plans whose collectives are started ahead. Gloo stands in for NCCL and CPUs for GPUs (`nccl.py`); where there are
GPUs, the last tests use them."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import DTYPE_NAMES, DTYPES, DeviceMeshError, MeshSpec, MonarchError, PlanError
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph
from monarch.distributed import Mesh
from monarch.runtime.collectives.communicator import Communicator, Watch
from monarch.runtime.collectives.listening import Network
from monarch.runtime.collectives.nccl import Nccl, interface_of
from monarch.runtime.collectives.rendezvous import Rendezvous
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.shared.signals import LINE, STEP_BITS, Aborted
from tests.compiler.kernels.triton.standin import stand_in
from tests.runtime.building import Building, each, op_on_each, whole
from tests.runtime.collectives import test_process_groups
from tests.runtime.collectives.loopback import executor_on
from tests.runtime.collectives.nccl import GlooForNccl, over_nccl, standing_in
from tests.runtime.collectives.test_collectives import REDUCTIONS, blocks, expected, groups_of, values
from tests.runtime.controller import test_failures
from tests.runtime.controller.test_failures import COLLECTIVES, MESH, healthy

pytestmark = pytest.mark.sample(1, of="executor")

ONE_GPU = f"needs as many GPUs as workers: torch.cuda.device_count() is {torch.cuda.device_count()}"


@pytest.fixture(scope="module", params=["local nccl", "hosts nccl"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


# -- what collectives give -------------------------------------------------------------------------------------------


def run_and_compare(
    executor: MeshExecutor, op: str, tensors: list[list[torch.Tensor]], dims: list[str], *args: Any
) -> None:
    """As with the mesh's own; but in whichever order the library adds."""
    plan, inputs = op_on_each(executor.mesh, op, tensors, dims, *args)
    want = expected(executor.mesh, op, tensors, dims, *args)
    exact = op not in ("all_reduce", "reduce_scatter") or args[-1] in ("min", "max")
    for i, handle in enumerate(executor.run(plan, inputs)):
        for rank, got in enumerate(executor.shards(handle)):
            assert (got.dtype, got.shape) == (want[i][rank].dtype, want[i][rank].shape)
            if exact or not got.dtype.is_floating_point:
                assert torch.equal(got, want[i][rank]), f"{op} {dims}: tensor {i} on worker {rank}"
            else:
                torch.testing.assert_close(got, want[i][rank], rtol=2e-2 if got.dtype.itemsize == 2 else 1e-4, atol=0.1)


def test_all_collectives_over_all_groups(executor: MeshExecutor) -> None:
    for dims in groups_of(MESH):
        size = len(MESH.group(0, dims))
        tensors = blocks(MESH, [(5, 6)])
        divisible = blocks(MESH, [(5 * size, 6), (size, 3)])
        run_and_compare(executor, "all_reduce", tensors, dims, "sum")
        run_and_compare(executor, "all_gather", tensors, dims, [1])
        run_and_compare(executor, "broadcast", tensors, dims, size - 1)
        ring = [(j, (j + 1) % size) for j in range(size)]
        run_and_compare(executor, "permute", tensors, dims, ring)
        run_and_compare(executor, "permute", tensors, dims, ring[:-1])
        run_and_compare(executor, "reduce_scatter", divisible, dims, [0, 0], "sum")
        run_and_compare(executor, "all_to_all", divisible, dims, [1, 1], [0, 0])


@pytest.mark.sample()
@pytest.mark.parametrize(("dtype", "reduction"), REDUCTIONS.values(), ids=REDUCTIONS)
def test_reductions_in_every_dtype(executor: MeshExecutor, dtype: torch.dtype, reduction: str) -> None:
    tensors = blocks(MESH, [(6, 4)], dtype)
    if dtype.is_complex and reduction != "sum":
        with pytest.raises(DeviceMeshError, match=f"cannot make the {reduction} of {dtype}"):
            run_and_compare(executor, "all_reduce", tensors, ["a", "b"], reduction)
        return
    run_and_compare(executor, "all_reduce", tensors, ["a", "b"], reduction)
    run_and_compare(executor, "reduce_scatter", tensors, ["a", "b"], [0], reduction)


def test_a_list_goes_together_whatever_is_in_it(executor: MeshExecutor) -> None:
    dims, k = ["a", "b"], MESH.workers
    shapes = [(k,), (0, 4), (k, 70, 30), (k * 2, 3), (k, 1), (k, 5)]
    dtypes = [torch.float32, torch.int16, torch.bfloat16, torch.bool, torch.float32, torch.uint8]
    mixed = [
        [values(shape, dtype, 10 * i + rank) for rank in range(k)]
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    run_and_compare(executor, "all_reduce", mixed, dims, "sum")
    run_and_compare(executor, "all_reduce", mixed, dims, "max")
    run_and_compare(executor, "all_gather", mixed, dims, [0] * len(mixed))
    run_and_compare(executor, "broadcast", mixed, dims, 1)
    run_and_compare(executor, "permute", mixed, dims, [(0, 1), (1, 0), (4, 5)])
    run_and_compare(executor, "reduce_scatter", mixed, dims, [0] * len(mixed), "sum")
    run_and_compare(executor, "all_to_all", [mixed[0], mixed[3]], dims, [0, 0], [0, 0])


def test_a_result_is_nobodys_but_the_steps_own() -> None:
    """What is written over it in place changes neither what was moved nor another result."""
    mesh = MeshSpec.of(w=2)
    with executor_on("local nccl", mesh) as executor:
        build, kind = Building(mesh, "own"), each(mesh, (4, 3))
        x = build.input(kind)
        both = build.call("all_reduce", [x, x], ["w"], "sum")
        first, second = (build.call("getitem", both, i) for i in range(2))
        build.call("aten.mul_.Tensor", first, 2.0)
        for slot in (x, first, second):
            build.output(build.call("aten.clone.default", slot), kind)
        value = torch.arange(12.0).view(4, 3)
        total = value[:2] + value[2:]
        found = [executor.shards(handle)[0] for handle in executor.run(build.plan(), [value])]
        for got, want in zip(found, (value[:2], total * 2, total), strict=True):
            assert torch.equal(got, want)


def test_what_the_compiler_starts_ahead() -> None:
    text = """graph @step on mesh<data=2> {
      %w = state "w"                  : f32[8, 8]
      %x = input 0                    : f32[8, 16@data]
      %d = input 1                    : f32[16@data, 8]
      %g = aten.mm(%x, %d)            : f32[8, 8]
      %m = aten.mm(%w, %w)            : f32[8, 8]
      %n = aten.sub.Tensor(%w, %g)    : f32[8, 8]
      update "w" = %n
      return %m
    }"""
    plan = compile_graph(parse_graph(text), CompileOptions(target="cuda:90", collectives="nccl", kernels="off"))
    started, waited = (
        next(i for i, each in enumerate(plan.instructions) if each.op == op) for op in ("all_reduce", "wait")
    )
    assert waited > started + 1
    w, x, d = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) for shape in ((8, 8), (8, 16), (16, 8)))
    with standing_in(), MeshExecutor(plan.mesh) as executor:
        handle = executor.put(w.clone(), plan.inputs[0].type)
        given = {"w": handle, 0: x, 1: d}
        for _ in range(3):
            squared, handle = executor.run(plan, [given[spec.label] for spec in plan.inputs])
            # What a shard of the sum differs in from x @ d, the square makes larger, and its sums cancel.
            torch.testing.assert_close(executor.shards(squared)[1], w @ w, rtol=1e-5, atol=1e-4)
            w = w - x @ d
            torch.testing.assert_close(executor.shards(handle)[1], w)
            given["w"] = handle


# -- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MONARCH_CACHE", str(tmp_path))
    monkeypatch.setenv("MONARCH_TEMPLATES", "off")
    monkeypatch.setenv("MONARCH_KERNELS", "all")
    stand_in(monkeypatch)
    with standing_in():
        yield


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
    return made, copy.deepcopy(made)


@pytest.mark.full
def test_training_over_nccl_gives_the_numbers_of_dense_pytorch(gpus: None) -> None:
    """Parameters in shards over `data`, gathered a layer ahead; gradients scattered; and a step that fails between."""
    dense, sharded = models()
    plain = torch.optim.AdamW(dense.parameters(), lr=0.05)
    with Mesh(data=2) as mesh:
        layouts = {name: ["data", *[None] * (p.ndim - 1)] for name, p in dense.named_parameters() if "0." not in name}
        layouts["0.weight"] = [None, None]
        model = monarch.module_to_mesh(sharded, mesh, layouts=layouts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        @monarch.program(target="cuda:90", collectives="nccl")
        def step(tokens: "i64[16@data]", targets: "i64[16@data]"):  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), targets)
            loss.backward()
            optimizer.step()
            return loss

        def reference(tokens: torch.Tensor) -> torch.Tensor:
            plain.zero_grad()
            loss = F.cross_entropy(dense(tokens), tokens)
            loss.backward()
            plain.step()
            return loss.detach()

        good = torch.arange(16)
        bad = torch.where(torch.arange(16) == 15, 99, good)  # only worker data=1 is asked for row 99
        for _ in range(2):
            for _ in range(2):
                torch.testing.assert_close(step(good, good).full_tensor(), reference(good), rtol=1e-4, atol=1e-5)
            with pytest.raises(DeviceMeshError, match="worker data=1 failed in .*: IndexError"):
                step(bad, good).item()
        torch.testing.assert_close(step(good, good).full_tensor(), reference(good), rtol=1e-4, atol=1e-5)
        for got, want in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), want.detach(), rtol=1e-3, atol=1e-4)
        assert "for cuda:90, over nccl" in repr(step.inspect(good, good))


# -- failing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", COLLECTIVES)
def test_peers_in_a_collective_are_told(executor: MeshExecutor, op: str) -> None:
    test_failures.test_peers_in_a_collective_are_told(executor, op, [1, 2])


def test_only_the_groups_concerned_give_up_and_all_come_back_together(executor: MeshExecutor) -> None:
    test_failures.test_only_the_groups_concerned_give_up_and_all_come_back_together(executor)


@pytest.mark.parametrize("failing", [[4], [0]], ids=str)
def test_who_waits_for_a_work_is_told(executor: MeshExecutor, failing: list[int]) -> None:
    """The group has been used in the step before somebody fails: the others wait for the works that they have started,
    and the watch ends these."""
    test_process_groups.test_who_waits_in_gloo_is_told(executor, failing)


def test_a_worker_that_is_killed_ends_every_wait() -> None:
    with executor_on("local nccl", MESH) as executor:
        build = Building(MESH, "long")
        x = build.input(whole((1 << 20,)))
        for _ in range(200):
            x = build.call("getitem", build.call("all_reduce", [x], ["a", "b"], "max"), 0)
        build.output(x, whole((1 << 20,)))
        pids = executor.worker_pids()
        healthy(executor)
        (handle,) = executor.run(build.plan(), [torch.zeros(1 << 20)])
        os.kill(pids[4], signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match=r"worker a=1, b=1 .*SIGKILL"):
            executor.wait(handle)


class OneGpu(GlooForNccl):
    one_gpu = True


def test_two_workers_on_one_gpu_are_refused() -> None:
    with standing_in(OneGpu), MeshExecutor(MESH) as executor:
        plan, inputs = op_on_each(MESH, "all_reduce", blocks(MESH, [(2, 2)]), ["b"], "sum")
        (handle,) = executor.run(over_nccl(plan), inputs)
        with pytest.raises(DeviceMeshError) as found:
            executor.wait(handle)
        text = str(found.value)
        assert "worker a=0, b=0 and worker a=0, b=1 have one GPU (GPU-1), and NCCL needs one for each worker" in text
        assert "make a mesh of no more workers than there are GPUs" in text
        (handle,) = executor.run(plan, inputs)  # by way of memory they can
        executor.wait(handle)


# -- the watch -------------------------------------------------------------------------------------------------------


class Stuck:
    """A library whose works are over once its group is aborted."""

    name = "NCCL"

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self, backend: Any) -> None:
        self.aborted.set()


def communicator(library: Any, words: list[int]) -> Communicator:
    collectives = SimpleNamespace(
        at=SimpleNamespace(step=3, signals=SimpleNamespace(words=words)),
        name_of=str,
        group=lambda dims: SimpleNamespace(size=2, me=0, peers=(1,), ranks=(0, 1)),
        all_gather=lambda dims, along: None,
    )
    made = Communicator(collectives, ["w"], library, Watch())  # type: ignore[arg-type]
    made.step, made.backend = 3, object()
    return made


def test_who_waits_where_nobody_looks_is_woken() -> None:
    """As a wait for the device does: it ends when the watch has aborted the group, and the step fails."""
    words, library = [0] * 64, Stuck()
    one = communicator(library, words)
    work = one.start(torch.device("cpu"), lambda group: SimpleNamespace(wait=library.aborted.wait))
    assert not library.aborted.is_set()
    words[2 * LINE] = 3 << STEP_BITS | 1
    with pytest.raises(Aborted, match="worker 1 failed"):
        one.wait(work), one.finish()
    assert library.aborted.is_set()
    one.watch.stop()


def test_what_a_library_says_of_a_work_fails_the_step() -> None:
    library: Any = SimpleNamespace(abort=lambda group: None, failed=lambda work: RuntimeError("unhandled system error"))
    one = communicator(library, [0] * 64)
    one.explained = lambda error: MonarchError(str(error))  # type: ignore[method-assign]
    one.start(torch.device("cpu"), lambda group: SimpleNamespace(wait=lambda: None))
    with pytest.raises(MonarchError, match="unhandled system error"):
        one.finish()
    one.finish()  # there is nothing of that step any more
    one.watch.stop()


# -- finding each other ----------------------------------------------------------------------------------------------


def test_the_worker_that_makes_up_the_id_has_said_all_with_it() -> None:
    first, second, alone = Rendezvous(says_least=128), Rendezvous(), Rendezvous(says_least=128)
    first.set("small", b"1")
    assert not first.asked.is_set()
    got: list[Any] = []

    def refused() -> None:
        with pytest.raises(RuntimeError, match="the others of the group have not come"):
            alone.set("0", bytes(128))

    threads = [
        threading.Thread(target=target)
        for target in (lambda: first.set("0", bytes(range(128))), lambda: got.append(second.get("0")), refused)
    ]
    for thread in threads:
        thread.start()
    for store in (first, second, alone):
        store.asked.wait()
    told = {**first.own, **second.own}
    for store in (first, second):
        store.answer(told)
    alone.answer({})
    for thread in threads:
        thread.join()
    assert got == [bytes(range(128))]
    assert second.check(["0"]) and not second.check(["1"])


def test_nccl_listens_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(MonarchError, match=r"no network interface of this host has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "other")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        Nccl().listen_on("127.0.0.1")
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo" and os.environ["NCCL_RAS_ENABLE"] == "0"


def test_nccl_is_not_used_between_hosts_with_tls() -> None:
    with pytest.raises(MonarchError, match="NCCL does not encrypt, and the hosts have TLS") as found:
        Network("10.0.0.1", None, tls=True).address("NCCL")
    assert found.value.hint is not None and found.value.hint.startswith('leave out collectives="nccl"; or,')


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(PlanError, match="is built without NCCL"):
        Nccl()


# -- on GPUs ---------------------------------------------------------------------------------------------------------


def on_gpus(workers: int) -> None:
    target = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    mesh = MeshSpec.of(w=workers)
    with MeshExecutor(mesh) as executor:
        run = executor.run
        options = CompileOptions(target=target, collectives="nccl")
        executor.run = lambda plan, inputs: run(replace(over_nccl(plan), options=options), inputs)  # type: ignore
        compare = partial(run_and_compare, executor)
        tensors = blocks(mesh, [(workers * 2, 6), (workers, 3)])
        compare("all_reduce", tensors, ["w"], "sum")
        compare("all_gather", tensors, ["w"], [0, 1])
        compare("reduce_scatter", tensors, ["w"], [0, 0], "sum")
        compare("all_to_all", tensors, ["w"], [1, 1], [0, 0])
        compare("broadcast", tensors, ["w"], workers - 1)
        compare("permute", tensors, ["w"], [(j, (j + 1) % workers) for j in range(workers)])
        for name, dtype in DTYPES.items():
            assert DTYPE_NAMES[dtype] == name
            compare("all_reduce", blocks(mesh, [(3, 4)], dtype), ["w"], "sum" if dtype.is_complex else "max")


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason=ONE_GPU)
def test_a_mesh_of_one_worker_on_a_gpu() -> None:
    on_gpus(1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=ONE_GPU)
def test_collectives_of_nccl_on_gpus() -> None:
    on_gpus(min(torch.cuda.device_count(), 8))
