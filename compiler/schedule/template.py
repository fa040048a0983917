"""The plan of a program of named sizes: one for all their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan.plan import ArenaRange, Instruction, Plan, ValueSpec
from monarch.compiler.schedule.arena import Lifetime, pack
from monarch.compiler.symbols import Scope, value_at


@dataclass(frozen=True)
class Template:
    """A plan with sizes that are expressions, the conditions under which it is right, and the data to run it.

    `plan`     its types, instructions' arguments and regions have Sizes; offsets in the arena are those of the example
    `spans`    what lies in the arena, in the order of the instructions' regions
    `scope`    the names, and the conditions on them
    `lowered`  of a program that is worth generated kernels: makes the plan with these for sizes that come again, which
               the kernels take as arguments
    `functions` the plan's branches and bodies of loops
    `parts`    of a program of several meshes: their templates, which `plan` is made of
    `joined`   then: makes the plan for these sizes of those of the parts
    """

    plan: Plan
    spans: tuple[Lifetime, ...]
    scope: Scope
    lowered: Callable[[Mapping[str, int]], Plan] | None = None
    functions: Mapping[str, Template] = field(default_factory=dict)
    parts: tuple[Template, ...] = ()
    joined: Callable[[Mapping[str, int], list[Plan]], Plan] | None = None

    def at(self, values: Mapping[str, int], again: bool = False) -> Plan:
        """The plan for these sizes, which meet the conditions: nothing is traced or partitioned for it. For sizes that
        come `again` it may have generated kernels, and to decide on them takes a hundred times as long."""
        if again and self.lowered is not None:
            return self.lowered(values)
        if self.joined is not None:
            return self.joined(values, [part.at(values) for part in self.parts])
        plan = self.plan
        arena, offsets = pack([replace(span, size=value_at(span.size, values)) for span in self.spans])
        functions = {name: function.at(values) for name, function in self.functions.items()}
        arena += max((function.arena for function in functions.values()), default=0)
        starts = iter(offsets)
        instructions = tuple(_at(instruction, values, starts) for instruction in plan.instructions)
        made = replace(
            plan,
            inputs=_values_at(plan.inputs, values),
            outputs=_values_at(plan.outputs, values),
            instructions=instructions,
            arena=arena,
            functions=functions,
        )
        return replace(made, hash=hash_of(made))


def _at(instruction: Instruction, values: Mapping[str, int], starts: Iterator[int]) -> Instruction:
    regions = tuple(
        region and ArenaRange(next(starts), region.dtype, value_at(region.shape, values))
        for region in instruction.regions
    )
    return replace(
        instruction,
        args=value_at(instruction.args, values),
        kwargs=value_at(instruction.kwargs, values),
        regions=regions,
    )


def _values_at(specs: tuple[ValueSpec, ...], values: Mapping[str, int]) -> tuple[ValueSpec, ...]:
    return tuple(replace(spec, type=spec.type.at(values)) for spec in specs)
