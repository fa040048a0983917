"""Whether a plan can run: ops that are allowed, slots that hold something when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from monarch.compiler import ops
from monarch.compiler.attention import IN_PARTS
from monarch.compiler.errors import MonarchError, PlanError
from monarch.compiler.loops.ir import KernelError, may_overwrite
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.allowed import PARAMETERS, RefusedOp, UnregisteredOp, allow
from monarch.compiler.plan.arena import overlapping, slots_in, wrong_region
from monarch.compiler.plan.binaries import check_binaries
from monarch.compiler.plan.check_parts import MOVING, wrong_parts
from monarch.compiler.plan.plan import Instruction, Plan, Slot
from monarch.compiler.plan.waits import wrong_wait


def check_plan(plan: Plan, fail: Callable[[str], NoReturn]) -> None:
    """Call `fail` with what is wrong, if anything is. Raises PlanError where an op of the user's is not registered."""
    if plan.parts:
        if (wrong := wrong_parts(plan)) is not None:
            fail(wrong)
        for part in plan.parts:
            check_part(part.plan, lambda message, part=part: fail(f"part {part.name!a}: {message}"))  # type: ignore[misc]
        return
    if plan.transfers or any(instruction.op in MOVING for instruction in plan.all_instructions):
        fail("it sends and receives, and has no parts")
    check_part(plan, fail)


def check_part(plan: Plan, fail: Callable[[str], NoReturn]) -> None:
    """The same for a plan without parts, or for one part's, whatever it sends and receives."""
    frame = len(plan.inputs) + len(plan.constant_slots) + len(plan.instructions)
    if plan.slots > frame:
        fail(f"it has {plan.slots} slots for {frame} values")
    if len(plan.donated) != len(plan.inputs):
        fail(f"'donated' has {len(plan.donated)} entries for {len(plan.inputs)} inputs")
    if set(plan.constants) != set(plan.constant_slots):
        fail("its constants are not those that it names slots for")
    held = [False] * plan.slots
    for slot in [*(spec.slot for spec in plan.inputs), *plan.constant_slots.values()]:
        if held[slot]:
            fail(f"two inputs share slot {slot}")
        held[slot] = True
    for position, instruction in enumerate(plan.instructions):
        try:
            _check_instruction(instruction, plan, held)
        except _Wrong as wrong:
            fail(f"instruction {position}, {instruction.op[:100]!a}: {wrong}")
        except UnregisteredOp as unknown:
            raise PlanError(
                f"plan {plan.name!a} calls {instruction.op!a}, which is not known here",
                hint=f"Import what registers the ops of {unknown.namespace!a} first (for a command: --import MODULE).",
            ) from None
    if (wait := wrong_wait(plan)) is not None:
        at, why = wait
        fail(f"instruction {at}, {plan.instructions[at].op!a}: {why}" if at < len(plan.instructions) else why)
    for spec in plan.outputs:
        if not held[spec.slot]:
            fail(f"output {spec.label!a} lies in slot {spec.slot}, which is empty at the end")
    for name, function in plan.functions.items():
        if plan.own_arena < 0:
            fail("its arena is smaller than those of its functions")
        kinds = {spec.kind for spec in function.inputs} | {spec.kind for spec in function.outputs}
        if kinds - {"input", "return"} or any(function.donated) or function.mesh != plan.mesh:
            fail(f"function {name!a} is a plan of its own")
        if any(instruction.op in MOVING for instruction in function.instructions):
            fail(f"function {name!a} sends or receives")
        check_part(function, lambda message, name=name: fail(f"function {name!a}: {message}"))  # type: ignore[misc]
    if (found := overlapping(plan)) is not None:
        fail(f"what instruction {found[0]} writes into the arena is lost by {found[1]}, and still to be read")
    check_binaries(plan, fail)


class _Wrong(Exception):
    pass


def _check_instruction(instruction: Instruction, plan: Plan, held: list[bool]) -> None:
    try:
        allow(instruction.op)
    except RefusedOp as refused:
        raise _Wrong(str(refused)) from None
    if instruction.op in PARAMETERS:
        _check_own_op(instruction, plan)
    for argument in (*instruction.args, *instruction.kwargs.values()):
        for slot in slots_in(argument):
            if not 0 <= slot < plan.slots:
                raise _Wrong(f"there is no slot {slot}, only 0 to {plan.slots - 1}")
            if not held[slot]:
                raise _Wrong(f"it reads slot {slot}, which is empty there")
    if type(instruction.out) is not int or not -1 <= instruction.out < plan.slots:
        raise _Wrong(f"there is no slot {instruction.out!a} for its result")
    if instruction.out >= 0:
        held[instruction.out] = True
    for slot in instruction.free:
        if type(slot) is not int or not 0 <= slot < plan.slots:
            raise _Wrong(f"there is no slot {slot!a} to free")
        held[slot] = False
    if (wrong := wrong_region(plan, instruction)) is not None:
        raise _Wrong(wrong)
    if type(instruction.source) is not int or not -1 <= instruction.source < len(plan.sources):
        raise _Wrong(f"there is no source line {instruction.source!a}")


def _check_own_op(instruction: Instruction, plan: Plan) -> None:
    """The arguments of an op of ours: as many as it takes, and mesh dims that the mesh has."""
    names = PARAMETERS[instruction.op]
    given = dict(zip(names, instruction.args, strict=False))
    if len(instruction.args) > len(names) or set(instruction.kwargs) != set(names[len(instruction.args) :]):
        raise _Wrong(f"it takes {', '.join(names) or 'nothing'}")
    given.update(instruction.kwargs)
    if instruction.op == "kernel":
        _check_kernel(**given)
    if instruction.op in _WITH_FUNCTIONS:
        _check_functions(instruction.op, given, plan)
    if instruction.op == "out_of_place":
        _check_out_of_place(**given)
    dims: list[Any] = [given["mesh_dim"]] if "mesh_dim" in given else []
    if "mesh_dims" in given:
        if not isinstance(given["mesh_dims"], list):
            raise _Wrong("its mesh dims are not a list")
        dims = given["mesh_dims"]
    for dim in dims:
        if not isinstance(dim, str) or dim not in plan.mesh.sizes or dims.count(dim) > 1:
            raise _Wrong(f"{dim!a} is not a dim of {plan.mesh}, or stands twice")


_WITH_FUNCTIONS = frozenset(op.name for op in ops.WITH_REGIONS)


def _check_functions(op: str, given: dict[str, Any], plan: Plan) -> None:
    """The functions that an op calls have as many inputs and outputs as the op has values for them."""
    lists = {name: given[name] for name in ("carried", "xs", "operands", "regions") if name in given}
    if not all(isinstance(value, list) for value in lists.values()):
        raise _Wrong(f"it takes lists as {', '.join(lists)}")
    names = lists["regions"]
    if len(names) != (1 if op == "scan" else 2) or not all(isinstance(n, str) and n in plan.functions for n in names):
        raise _Wrong(f"it cannot call {names!a:.100}")
    functions = [plan.functions[name] for name in names]
    carried, xs = len(lists.get("carried", ())), len(lists.get("xs", ()))
    takes = carried + xs + len(lists["operands"]) + (op != "cond")
    if any(len(function.inputs) != takes for function in functions):
        raise _Wrong(f"a function of it does not take {takes} values")
    gives = [len(function.outputs) for function in functions]
    right = {"cond": gives[0] == gives[-1], "while_loop": gives == [1, carried], "scan": gives[0] >= carried}
    if not right[op]:
        raise _Wrong("its functions give other values than it")
    if op == "scan" and (type(given["length"]) is not int or given["length"] < 0 or type(given["reverse"]) is not bool):
        raise _Wrong("its length is no number of rounds")


def _check_out_of_place(op: Any, names: Any, values: Any, written: Any) -> None:
    """The op that it runs has to be one that a plan may call."""
    if not isinstance(op, str) or op in PARAMETERS or op == "getitem":
        raise _Wrong(f"{op!a:.100} is no op that writes to its arguments")
    try:
        allow(op)
    except RefusedOp as refused:
        raise _Wrong(f"{op!a:.100}: {refused}") from None
    if not isinstance(names, list) or not isinstance(values, list) or len(names) != len(values):
        raise _Wrong("it takes as many names as values")
    if not isinstance(written, list) or not all(isinstance(name, str) and name in names for name in written):
        raise _Wrong(f"it cannot write {written!a:.100}")


def _check_kernel(tensors: Any, text: Any, over: Any) -> None:
    """A kernel is data, and checked as such: what is compiled is written from it on the machine that runs it."""
    if not isinstance(text, str) or not isinstance(tensors, list) or not isinstance(over, list):
        raise _Wrong("it takes a list of tensors, a text and a list of numbers")
    try:
        kernel = parse_kernel(text)
    except KernelError as error:
        raise _Wrong(error.message) from None
    if len(tensors) != len(kernel.inputs) or not all(isinstance(tensor, Slot) for tensor in tensors):
        raise _Wrong(f"its kernel takes {len(kernel.inputs)} tensors")
    if len(over) != len(kernel.outputs):
        raise _Wrong(f"its kernel gives {len(kernel.outputs)} tensors, and it says of {len(over)} where they lie")
    taken = [at for at in over if at != -1]
    if any(type(at) is not int or not -1 <= at < len(tensors) for at in over) or len(set(taken)) < len(taken):
        raise _Wrong(f"its results cannot lie over {over!a:.100}")
    for number, at in enumerate(over):
        if at != -1 and (not may_overwrite(kernel, number, at) or tensors.count(tensors[at]) > 1):
            raise _Wrong(f"its result {number} cannot lie over tensor {at}")


def check_ops(plan: Plan) -> None:
    """Raise MonarchError, at the user's line, where a plan for a GPU calls an op of ATen's that CPUs alone have."""
    for instruction in plan.instructions:
        name = instruction.op.removeprefix("aten.")
        if instruction.op in IN_PARTS or not (name.startswith(_FOR_CPUS) or "_for_cpu" in name):
            continue
        raise MonarchError(
            f"'{plan.name}' is compiled for {plan.target}, and calls {instruction.op}, which CPUs alone have",
            hint="torch chose it for the CPU on which the program is traced: use a layer that GPUs have too, or write\n"
            "with torch.backends.mkldnn.flags(enabled=False): around its call.",
            source=plan.sources[instruction.source] if instruction.source >= 0 else None,
        )


_FOR_CPUS = ("mkldnn_", "_mkldnn_", "fbgemm_")
"""How the names begin of ops of libraries for CPUs."""
