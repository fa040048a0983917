"""Reports from the JSON values of `encode_report`, with all that a file says checked on the way. Without torch."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from monarch.compiler.layout import MeshSpec
from monarch.compiler.plan.checks import short
from monarch.compiler.plan.report import PHASES, Alternative, Collectives, Decision, Report, ReportedValue

_KEYS = ("strings", "types", "alternatives", "decisions", "values", "lines")
_VALUE_FIELDS, _DECISION_FIELDS, _COLLECTIVES_FIELDS = 22, 7, 6


class TypeChecks(Protocol):
    """`Checks` that also read a value's type: as a `TensorType`, or as its text."""

    def fail(self, message: str) -> NoReturn: ...
    def integer(self, value: Any, what: str, low: int = 0, high: int = 2**63) -> int: ...
    def items(self, value: Any, what: str, length: int | None = None) -> list[Any]: ...
    def mapping(self, value: Any, what: str, keys: Any = None) -> dict[str, Any]: ...
    def strings(self, value: Any, what: str) -> tuple[str, ...]: ...
    def type(self, value: Any, mesh: MeshSpec, what: str) -> Any: ...


def decode_report(data: Any, decoder: TypeChecks, mesh: MeshSpec, instructions: int, sources: int) -> Report:
    """The report that `encode_report` gave, for a plan of so many instructions and source lines."""
    return _ReportDecoder(decoder, mesh, instructions, sources).report(data)


class _ReportDecoder:
    def __init__(self, decoder: TypeChecks, mesh: MeshSpec, instructions: int, sources: int) -> None:
        self.decoder = decoder
        self.mesh = mesh
        self.instructions = instructions
        self.sources = sources
        self.strings: tuple[str, ...] = ()
        self.types: list[Any] = []
        self.alternatives: list[tuple[Alternative, ...]] = []
        self.decisions: list[Decision] = []
        self.count = 0
        self.last = -1
        self.inside = False

    def report(self, data: Any) -> Report:
        decoder = self.decoder
        parts = decoder.mapping(data, "the report", _KEYS)
        rows = decoder.items(parts["values"], "the report's values")
        self.count = len(rows)
        self.strings = decoder.strings(parts["strings"], "a string of the report")
        self.types = [
            decoder.type(each, self.mesh, "a value of the report")
            for each in decoder.items(parts["types"], "the report's types")
        ]
        self.alternatives = [
            tuple([self.alternative(entry) for entry in decoder.items(each, "a list of alternatives")])
            for each in decoder.items(parts["alternatives"], "the report's alternatives")
        ]
        self.decisions = [self.decision(each) for each in decoder.items(parts["decisions"], "the report's decisions")]
        values = tuple([self.value(number, row) for number, row in enumerate(rows)])
        lines = decoder.strings(parts["lines"], "a line of the report")
        if len(lines) != self.sources:
            decoder.fail(f"its report has {len(lines)} lines for {self.sources} sources")
        if len({value.name for value in values}) < len(values):
            decoder.fail("two values of its report have one name")
        return Report(values, lines)

    def alternative(self, row: Any) -> Alternative:
        text, extra = self.decoder.items(row, "an alternative", 2)
        return Alternative(self.string(text), self.number(extra, "the cost of an alternative"))

    def decision(self, row: Any) -> Decision:
        decoder = self.decoder
        mesh_dim, rule, factor, why, causes, alternatives, exact = decoder.items(row, "a decision", _DECISION_FIELDS)
        if type(exact) is not bool:
            decoder.fail(f"whether a decision is exact is {short(exact)}")
        return Decision(
            self.mesh_dim(mesh_dim),
            self.string(rule),
            self.string(factor),
            self.string(why),
            tuple([self.index(each, self.count, "a cause") for each in decoder.items(causes, "the causes")]),
            self.alternatives[self.index(alternatives, len(self.alternatives), "the alternatives of a decision")],
            exact,
        )

    def value(self, number: int, row: Any) -> ReportedValue:
        decoder = self.decoder
        (
            name, op, call, reads, types, instruction, source, module, phase, traced, why, decisions, mesh_dims, sent,
            flops, moved, allocates, frees, seconds, kernel, within, stage,
        ) = decoder.items(row, "a value of the report", _VALUE_FIELDS)  # fmt: skip
        if type(instruction) is not int or not -1 <= instruction < self.instructions:
            decoder.fail(f"a value of the report is made by instruction {short(instruction)}")
        if instruction >= 0:
            if instruction < self.last or (instruction == self.last and not self.inside):
                decoder.fail("the values of the report are not in the order of the instructions")
            self.last = instruction
        if type(kernel) is not int or not -1 <= kernel < self.count:
            decoder.fail(f"a value of the report is computed by the kernel {short(kernel)}")
        self.inside = kernel > number  # then the kernel comes later, with the same instruction
        if type(source) is not int or not -1 <= source < self.sources:
            decoder.fail(f"a value of the report has the source line {short(source)}")
        result = [
            None if each is None else self.types[self.index(each, len(self.types), "a type")]
            for each in decoder.items(types, "the types of a value")
        ]
        kinds = [self.index(each, len(self.decisions), "a decision") for each in decoder.items(decisions, "decisions")]
        made = [self.decisions[each] for each in kinds]
        if len({each.mesh_dim for each in made}) < len(made):
            decoder.fail("a value of the report has two decisions for one mesh dim")
        return ReportedValue(
            name=self.string(name),
            op=self.string(op),
            call=self.string(call),
            reads=tuple([self.index(each, number, "a value that is read") for each in decoder.items(reads, "reads")]),
            types=tuple(result),
            instruction=instruction,
            source=source,
            module=self.string(module),
            phase=PHASES[self.index(phase, len(PHASES), "a phase")],
            traced=self.string(traced),
            why=self.string(why),
            decisions=tuple(made),
            mesh_dims=tuple([self.mesh_dim(each) for each in decoder.items(mesh_dims, "mesh dims")]),
            sent=decoder.integer(sent, "the bytes sent"),
            flops=self.number(flops, "the operations of a value", 0.0),
            moved=decoder.integer(moved, "the bytes moved"),
            allocates=decoder.integer(allocates, "the bytes allocated"),
            frees=decoder.integer(frees, "the bytes freed"),
            seconds=self.number(seconds, "the seconds of a value", 0.0),
            kernel=kernel,
            within=tuple([self.collectives(each) for each in decoder.items(within, "the collectives within a value")]),
            stage=decoder.integer(stage, "the stage of a value", -1),
        )

    def collectives(self, row: Any) -> Collectives:
        decoder = self.decoder
        op, dims, count, tensors, sent, seconds = decoder.items(row, "collectives within a value", _COLLECTIVES_FIELDS)
        return Collectives(
            self.string(op),
            tuple([self.mesh_dim(each) for each in decoder.items(dims, "mesh dims")]),
            decoder.integer(count, "the number of collectives"),
            decoder.integer(tensors, "the tensors of collectives"),
            decoder.integer(sent, "the bytes sent"),
            self.number(seconds, "the seconds of collectives", 0.0),
        )

    def index(self, value: Any, length: int, what: str) -> int:
        if type(value) is not int or not 0 <= value < length:
            self.decoder.fail(f"{what} of the report is number {short(value)}, of {length}")
        return value

    def string(self, value: Any) -> str:
        return self.strings[self.index(value, len(self.strings), "a string")]

    def mesh_dim(self, value: Any) -> str:
        name = self.string(value)
        if name not in self.mesh.sizes:
            self.decoder.fail(f"its report names {short(name)}, which is no dim of {self.mesh}")
        return name

    def number(self, value: Any, what: str, least: float = -1e300) -> float:
        if type(value) not in (int, float) or not least <= value <= 1e300:
            self.decoder.fail(f"{what} of the report is {short(value)}")
        return float(value)
