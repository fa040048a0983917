"""Exit ends: no child that a program has forked keeps it waiting, at its end or where it needs a new warm parent."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from tests import python
from tests.runtime.processes.test_processes import BOUND, ended, next_line

ROOT = Path(__file__).resolve().parents[3]

MESH = """
    import os, signal, sys
    import torch
    import monarch
    from monarch.distributed import Mesh

    def sleep():
        os.close(1)
        os.close(2)
        while True:
            signal.pause()

    def child():
        pid = os.fork()
        if pid == 0:
            sleep()
        return pid

    def works(mesh):
        return (monarch.distribute(torch.ones(4), mesh, "[@data]") * 2).sum().item() == 8
"""

FORMS = {
    "forks, in a step and between two meshes": """
        mesh = Mesh(data=2)
        fine = works(mesh)
        x = monarch.distribute(torch.ones(400, 400), mesh, "[@data, -]")
        for _ in range(50):
            x = (x @ x.T) / 400
        mesh.flush()
        pid = child()
        print(fine and works(Mesh(data=4)), pid, flush=True)
    """,
    "a daemon of multiprocessing": """
        import multiprocessing
        mesh = Mesh(data=2)
        fine = works(mesh)
        process = multiprocessing.get_context("fork").Process(target=sleep, daemon=True)
        process.start()
        print(fine, process.pid, flush=True)
    """,
    "workers of a DataLoader": """
        from torch.utils.data import DataLoader
        mesh = Mesh(data=2)
        fine = works(mesh)
        loader = DataLoader(list(range(100)), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
        batches = iter(loader)
        next(batches)
        print(fine, loader._iterator._workers[0].pid, flush=True)
    """,
    "a second warm parent": """
        mesh = Mesh(data=2)
        fine = works(mesh)
        pid = child()
        mesh.close()
        @torch.library.custom_op("exit_tests::nothing", mutates_args=())
        def nothing(x: torch.Tensor) -> torch.Tensor:
            return x.clone()
        print(fine and works(Mesh(data=2)), pid, flush=True)
    """,
    "a stopped warm parent, and another mesh": """
        from monarch.runtime.processes.parent import warm_parent
        mesh = Mesh(data=2)
        fine = works(mesh)
        pid = warm_parent().pid
        os.kill(pid, signal.SIGSTOP)
        print(fine and works(Mesh(data=2)), pid, flush=True)
        mesh.close()
    """,
    "a thread that steps": """
        import threading
        mesh = Mesh(data=2)
        fine = works(mesh)
        begun = threading.Event()
        def steps():
            while works(mesh):
                begun.set()
        threading.Thread(target=steps, daemon=True).start()
        begun.wait()
        print(fine, child(), flush=True)
    """,
    "actors": """
        from monarch.actor import this_host
        procs = this_host().spawn_procs({"data": 2})
        fine = works(Mesh(procs=procs))
        print(fine, child(), flush=True)
    """,
}


def started(source: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}:{ROOT}"}
    code = textwrap.dedent(MESH) + textwrap.dedent(source)
    return python.Popen("-c", code, stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT)


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_program_ends_while_its_children_live(form: str) -> None:
    process = started(FORMS[form])
    works, child = next_line(process).split()
    try:
        assert works == "True"
        assert process.wait(BOUND) == 0
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.communicate(timeout=BOUND)
    assert ended(int(child))


def test_a_forked_child_that_leaves_a_with_block_leaves_the_mesh_alone() -> None:
    process = started("""
        with Mesh(data=2) as mesh:
            fine = works(mesh)
            pid = os.fork()
            if pid:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                print(fine, status, [works(mesh) for _ in range(3)], flush=True)
    """)
    out, _ = process.communicate(timeout=BOUND)
    assert out == "True 0 [True, True, True]\n" and process.returncode == 0


def test_a_stopped_warm_parent_goes_on_where_it_is_waited_for() -> None:
    """It has to tell of a worker's death; the next mesh may have asked it to fork before it was seen to be stopped."""
    process = started("""
        from monarch.exceptions import DeviceMeshError
        from monarch.runtime.processes.parent import warm_parent
        mesh = Mesh(data=2)
        fine = works(mesh)
        warm, pids = warm_parent(), mesh.executor.worker_pids()
        os.kill(warm.pid, signal.SIGSTOP)
        while not warm.is_stopped:
            pass
        os.kill(pids[0], signal.SIGKILL)
        try:
            works(mesh)
        except DeviceMeshError as error:
            print(fine, "SIGKILL" in str(error), flush=True)
    """)
    out, _ = process.communicate(timeout=BOUND)
    assert out == "True True\n" and process.returncode == 0


@pytest.mark.sample()
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["mesh", "actors"])
def test_exit_handlers_of_the_program_can_use_its_meshes(what: str, when: str) -> None:
    """Wherever they are registered: before the first mesh, or after it."""
    start = {
        "mesh": "mesh = Mesh(data=2)\nuse = lambda: works(mesh)",
        "actors": """
from monarch.actor import this_host
procs = this_host().spawn_procs({"data": 2})
mesh = Mesh(procs=procs)
use = lambda: works(mesh) and len(procs.stacks().get(30).values()) == 2
""",
    }[what]
    register = "import atexit\natexit.register(lambda: print('at exit', use(), flush=True))\n"
    first = "print(use(), flush=True)\n"
    process = started(register + start + "\n" + first if when == "before" else start + "\n" + first + register)
    out, _ = process.communicate(timeout=BOUND)
    assert out == "True\nat exit True\n" and process.returncode == 0


def test_workers_start_while_a_module_is_imported(tmp_path: Path) -> None:
    """It has an op that they have by name. They do not wait for the import, with which no thread of theirs goes on."""
    (tmp_path / "loaded.py").write_text(
        textwrap.dedent(
            """
            import torch
            import monarch
            from monarch.distributed import Mesh

            def double(x):
                return x * 2

            op = monarch.remote(double, propagate=lambda x: x)

            @monarch.program
            def step(x):
                return op(x)

            result = step(monarch.distribute(torch.arange(4.0), Mesh(data=2))).full_tensor()
            """
        )
    )
    program = "import loaded; print(loaded.result.tolist())"
    done = python.run("-c", program, cwd=tmp_path, capture_output=True, text=True, timeout=BOUND)
    assert done.stdout == "[0.0, 2.0, 4.0, 6.0]\n", done.stderr
