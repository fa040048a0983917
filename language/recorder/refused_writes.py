"""The errors of ops in place that a program, or a distributed tensor, cannot make."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.errors import ArgumentWritten, ProgramError
from monarch.language.errors import OperatorError
from monarch.language.recorder.recording import Recording, current
from monarch.language.recorder.refusals import refuse
from monarch.language.source import calls_from, user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.instead import instead


def reshaped_in_place(func: Any) -> OperatorError:
    return refuse(
        OperatorError(
            f"{func.overloadpacket} changes a tensor's shape in place, which a distributed tensor cannot",
            hint="a smaller one: x = x.flatten()[: math.prod(size)].view(size), in the order of dims, not of memory."
            if func.overloadpacket is torch.ops.aten.resize_
            else "use the form of the op that returns a new tensor.",
            source=user_source(),
        )
    )


def argument_write(recording: Recording, cell: Cell) -> ArgumentWritten:
    """The error of a program that writes to a plain tensor among its arguments."""
    number = recording.input_cells[id(cell)]
    path = "" if number is None or recording.path_of is None else recording.path_of(number)
    x = "x" if not path or path[0].isdigit() else path
    copy, placed = f"{x} = {x}.clone()", f"{x} = monarch.distribute({x}, mesh)"
    return ArgumentWritten(
        f"{f'argument {path}' if path else 'an argument'} of the program is a plain tensor, and the program "
        "changes it in place",
        hint=f"{copy:{len(placed)}}   # right: at the program's start, which returns what its caller needs\n"
        f"{placed}   # right: before the call, and passed, which changes it",
        source=user_source(),
    )


def plain_write(tensor: torch.Tensor) -> ProgramError:
    """The error of a program that writes to a plain tensor from outside."""
    where = "in a program" if current.recording is not None else "by a distributed one"
    if calls_from("torch/optim/lr_scheduler"):
        return ProgramError(
            f"a scheduler changes the learning rate of its optimizer, a plain tensor, in place {where}",
            hint=instead(
                "optimizer = torch.optim.Adam(model.parameters(), lr=0.1)     # right: a float is an input\n"
                "optimizer = torch.optim.Adam(model.parameters(), lr=monarch.distribute(torch.tensor(0.1), mesh))"
            ),
            source=user_source(),
        )
    if isinstance(tensor, torch.nn.Parameter) or calls_from("torch/optim"):
        return ProgramError(
            f"a plain parameter, or its optimizer's state, of shape {list(tensor.shape)} is changed in place "
            f"{where}: its model is not on a mesh",
            hint=instead(
                "model = monarch.module_to_mesh(model, mesh)     # right: before the optimizer is made\n"
                "optimizer = torch.optim.Adam(model.parameters(), ...)"
            ),
            source=user_source(),
        )
    return ProgramError(
        f"a plain tensor of shape {list(tensor.shape)} is changed in place {where}",
        hint=instead(
            "place it on the mesh first: x = monarch.distribute(x, mesh, layout); "
            "a module's buffers with monarch.module_to_mesh(module, mesh)."
        ),
        source=user_source(),
    )
