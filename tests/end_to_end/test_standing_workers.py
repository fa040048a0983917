"""Ctrl-C does not wait for a worker that stands still, whatever the controller is doing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from time import sleep

import pytest
import torch

import monarch
from monarch.distributed import Mesh
from tests.runtime.stopping import stopped

WAIT = 60


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["a first step", "a step that makes no state", "a value"])
def test_ctrl_c_ends_a_wait_for_a_worker_that_stands_still(steps: int) -> None:
    main, ended, interrupted, late = threading.main_thread(), threading.Event(), threading.Event(), threading.Event()

    def waits() -> bool:
        frame = sys._current_frames().get(main.ident or 0)
        while frame is not None:
            if frame.f_code.co_name == "catch_up":
                return True
            frame = frame.f_back
        return False

    def interrupt(worker: int) -> None:
        while not waits() and not ended.is_set():
            sleep(0.01)
        interrupted.set()
        os.kill(os.getpid(), signal.SIGINT)
        if not ended.wait(WAIT):
            late.set()
            os.kill(worker, signal.SIGCONT)  # it would wait for ever

    with Mesh(data=2) as mesh:
        weight = monarch.distribute(torch.ones(4), mesh, "[-]").requires_grad_()
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        @monarch.program(mesh=mesh)
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (x * weight).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        for _ in range(steps):
            step(torch.ones(4)).item()
        before = weight.full_tensor()
        worker = mesh.executor.worker_pids()[0]  # type: ignore[attr-defined]
        with stopped(worker):
            thread = threading.Thread(target=interrupt, args=(worker,))
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                step(torch.ones(4)).item()
            ended.set()
            thread.join()
            assert interrupted.is_set() and not late.is_set()
        assert torch.equal(weight.full_tensor(), before)
        assert step(torch.ones(4)).item() == pytest.approx(before.square().mean().item())
