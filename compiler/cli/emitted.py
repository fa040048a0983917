"""`monarchc inspect --emit`: the sources of a plan's generated kernels, with the user's lines that they come from."""

from __future__ import annotations

from collections.abc import Mapping

from monarch.compiler.cli.screen import count, duration
from monarch.compiler.errors import MonarchError, did_you_mean
from monarch.compiler.kernels.cpp.emit import emit as emit_cpp
from monarch.compiler.kernels.templates import templates
from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.calls import arguments
from monarch.compiler.kernels.triton.emit import emit, variants_of
from monarch.compiler.kernels.triton.source import Launch
from monarch.compiler.kernels.triton.variants import Tiles
from monarch.compiler.loops.ir import Kernel, Op, Reduce
from monarch.compiler.plan import Plan
from monarch.compiler.plan.binaries import KernelBinary, TemplateCall, kernels_of


def text(plan: Plan, language: str, name: str | None) -> str:
    """The kernels of a plan, or those that are called `name`, in one of LANGUAGES; "ptx" is AMD's assembly for gfx942.

    Raises MonarchError for an unknown name, for a plan without kernels, and for the assembly of a plan for CPUs."""
    kernels = _chosen(plan, name)
    if language == "cpp":
        return (
            "\n".join(f"// {_heading(kernel)}" for kernel in kernels.values())
            + "\n\n"
            + emit_cpp(list(kernels.values()), lines=True)
        )
    if language == "triton":
        parts = []
        for key, kernel in kernels.items():
            if name is None and any(nest.sums for nest in kernel.nests):
                note = "one pass, as on CPUs only; --target cuda:90 shows what a GPU does instead"
                parts.append(f"# {_heading(kernel)}\n# {note}\n")
                continue
            source = emit(kernel, lines=True, tiles=_tiles(plan, key, kernel))
            launches = "".join(f"# {_launch(launch)}\n" for launch in source.launches)
            parts.append(f"# {_heading(kernel)}\n{_variants(plan, key)}{launches}\n{source.text}")
        parts += [_template(plan, binary, call) for binary, call in _templates(plan, name)]
        return "\n\n".join(parts)
    return _assembly(plan, kernels, name)


def _chosen(plan: Plan, name: str | None) -> Mapping[str, Kernel]:
    kernels = kernels_of(plan)
    templates = {call.name for _, call in _templates(plan, None)}
    if not kernels and not templates:
        raise MonarchError(
            f"{plan.name} has no generated kernels",
            hint="they are made where they spare enough time; MONARCH_KERNELS=all makes all that can be.",
        )
    if name is None:
        return kernels
    chosen = {key: kernel for key, kernel in kernels.items() if kernel.name == name}
    if not chosen and name not in templates:
        names = sorted({*templates, *(kernel.name for kernel in kernels.values())})
        hint = did_you_mean(name, names, "") or f"it has {', '.join(names)}."
        raise MonarchError(f"{plan.name} has no kernel {name!r}", hint=hint)
    return chosen


def _heading(kernel: Kernel) -> str:
    """A kernel's description, and the user's lines that it comes from."""
    ops = sum(isinstance(each, Op | Reduce) for nest in kernel.nests for each in nest.body)
    lines = dict.fromkeys(line for nest in kernel.nests for line in nest.lines if line)
    return f"kernel {kernel.name}: {count(ops, 'operation')}, from {', '.join(lines) or 'no line that is known'}"


def _tiles(plan: Plan, key: str, kernel: Kernel) -> Tiles | None:
    """The tiles of the variant of a kernel that the plan runs, or would."""
    if plan.target == "cpu":
        return None
    chosen = next((each.variant for each in plan.binaries if each.kernel == key), "")
    known = [tiles for tiles, _ in variants_of(kernel, plan.target)]
    return next((tiles for tiles in known if str(tiles or "") == chosen), known[0])


def _variants(plan: Plan, key: str) -> str:
    """A comment on each variant of a kernel of which there are several, the one that runs first."""
    found = [each for each in plan.binaries if each.kernel == key and each.variant]
    told = [
        f"# variant {each.variant}"
        + (f": {duration(each.seconds)} {'measured' if each.measured else 'estimated'}" if each.seconds else "")
        for each in found
    ]
    return "".join(f"{line}{', which runs' if not at else ''}\n" for at, line in enumerate(told))


def _launch(launch: Launch) -> str:
    constants = [f"{name}={value}" for name, value in launch.constants]
    arguments = ", ".join([*launch.arguments, *constants, f"num_warps={launch.warps}"])
    return f"{launch.function}[{launch.grid:,}]({arguments})"


def _templates(plan: Plan, name: str | None) -> list[tuple[KernelBinary, TemplateCall]]:
    """The calls of a plan that templates run, each with the variant that does; those of one template by its name."""
    found = {each.kernel: (each, each.call) for each in reversed(plan.binaries) if each.call is not None}
    return [pair for pair in reversed(found.values()) if name is None or pair[1].name == name]


def _describe_template(plan: Plan, call: TemplateCall) -> list[str]:
    """The op that a template runs, its lines in the user's program, and the reason."""
    first = plan.instructions[call.instructions[0]]
    where = (plan.instructions[at].source for at in call.instructions)
    sources = [plan.sources[at] for at in where if at >= 0]
    files = dict.fromkeys(f"{each.file.rsplit('/', 1)[-1]}:{each.line}" for each in sources)
    return [
        f"template {call.name}: {count(len(call.instructions), 'call')} of {first.op}, from "
        f"{', '.join(files) or 'no line that is known'}",
        call.why,
    ]


def _template(plan: Plan, binary: KernelBinary, call: TemplateCall) -> str:
    """The text of a template's kernels, as the plan launches them."""
    import torch

    instruction = plan.instructions[call.instructions[0]]
    tensors = [torch.empty_strided(b.shape, b.strides, dtype=b.dtype, device="meta") for b in call.inputs]
    args, kwargs = arguments(instruction, tensors)
    template = templates()[instruction.op]
    variants = template.variants(*args, **kwargs)
    _, launches = template.launches(variants[0], args, kwargs)
    told = [f"# {line}" for line in _describe_template(plan, call)]
    for launch in binary.launches:
        constants = [f"{name}={value}" for name, value in launch.constants]
        given = ", ".join([*launch.arguments, *constants, f"num_warps={launch.warps}"])
        told.append(f"# {launch.function}[{', '.join(map(str, launch.grid))}]({given})")
    return (
        "\n".join(told)
        + "\n"
        + _variants(plan, binary.kernel)
        + "\n"
        + "\n\n".join(dict.fromkeys(launch.source() for launch in launches))
    )


def _assembly(plan: Plan, kernels: Mapping[str, Kernel], name: str | None) -> str:
    if plan.target == "cpu":
        raise MonarchError(
            f"{plan.name} is compiled for CPUs, and has no PTX", hint="compile the program for a GPU: --target cuda:90."
        )
    there = {binary.kernel: binary for binary in reversed(plan.binaries)}  # the first variant of each
    parts = []
    for key, kernel in kernels.items():
        if key in there:
            texts = [launch.assembly for launch in there[key].launches]
        else:
            texts = [compiled.assembly for compiled in compile_launches(kernel, emit(kernel), plan.target)]
        parts.append(f"// {_heading(kernel)}\n" + "\n".join(texts).expandtabs(4))
    for binary, call in _templates(plan, name):
        told = "".join(f"// {line}\n" for line in _describe_template(plan, call))
        parts.append(told + "\n".join(launch.assembly for launch in binary.launches).expandtabs(4))
    return "\n\n".join(parts)
