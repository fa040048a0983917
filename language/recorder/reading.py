"""Reading a tensor's value into Python: outside of programs that waits for it; inside, the trace has to know it.

Torch's optimizers read the number of the step, and get a number that is recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.ops.record import enter
from monarch.compiler.tape import Expr
from monarch.language.errors import OperatorError, branch_error, lengths_error, loader_error
from monarch.language.recorder.dispatch import clone, record
from monarch.language.recorder.known import known_value
from monarch.language.recorder.recording import current_program, recording_for
from monarch.language.recorder.scalar import Scalar
from monarch.language.recorder.validation import deferred
from monarch.language.recorder.varying import active, varying_of
from monarch.language.source import calls_from, user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten

_OPTIMIZERS = "/torch/optim/"


def read_item(tensor: DistributedTensor) -> Any:
    """A tensor's one value as a Python number. Torch's optimizers get a number of the step (a Scalar) instead, so that
    their arithmetic is recorded; in a program everybody else gets an error."""
    if tensor.numel() != 1:
        raise OperatorError(
            f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar",
            hint=f"it is {tensor._ref.type}: reduce it first, or fetch it with full_tensor().",
            source=user_source(),
        )
    recording = current_program()
    if calls_from(_OPTIMIZERS) and tensor.dtype.is_floating_point:
        recording = recording_for(tensor.mesh)
        copy = record(aten._to_copy.default, (tensor.detach().reshape(()),), {"dtype": torch.float64})
        if copy._ref.cell is tensor._ref.cell:  # already f64: keep its value as it is now
            copy = clone(copy)
        ask = None if recording.program else lambda: copy.full_tensor().item()
        return Scalar(Expr("item", (recording.value_of(copy._ref),)), None, recording.guard, ask)
    own = next(iter(varying_of(tensor)), "") if active.regions else ""
    if recording is not None:
        known = known_value(recording, tensor)
        if known is not None:
            return known.item()
        if calls_from("/torch/nn/modules/rnn.py"):  # a recurrent layer asks a PackedSequence for its `batch_sizes`
            raise lengths_error(user_source())
        if calls_from("/torch/utils/data/"):
            raise loader_error(user_source())
    if recording is not None or own:
        raise branch_error(user_source(), own)
    return tensor.full_tensor().item()


def read_truth(tensor: DistributedTensor) -> bool:
    """Whether a tensor's one value is not zero. In a program only where it is known, or where the other answer only
    raises."""
    if tensor.numel() != 1:
        raise OperatorError(
            f"Boolean value of Tensor with {'more than one value' if tensor.numel() else 'no values'} is ambiguous",
            hint=f"it is {tensor._ref.type}: ask for .any() or .all() of it.",
            source=user_source(),
        )
    recording = current_program()
    if recording is not None and known_value(recording, tensor) is None:
        outcome = deferred(tensor)
        if outcome is not None:
            return outcome
    return bool(read_item(tensor))


def read_known(tensor: DistributedTensor) -> torch.Tensor | None:
    """A tensor's value where it is known while the program is traced."""
    recording = current_program()
    return None if recording is None else known_value(recording, tensor)


def _local_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    number = read_item(args[0])
    return number


enter((aten._local_scalar_dense,), record=_local_scalar)
