"""How calls find their rules: users' own ops, arguments by name, and what users read where there is no rule."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx

from monarch.compiler.errors import RuleError, Source
from monarch.compiler.graph import Provenance
from monarch.compiler.ops.record import records_kept
from monarch.compiler.partition.whole import suggested_line
from monarch.compiler.rules import Call, Rule, Strategy, localizer, rule_for, sharding_rule, tensor_operands
from monarch.compiler.rules.localize import LocalCall, Localized
from monarch.compiler.types import TensorType
from tests.compiler.rules.dense import call, check_all, local_node, shape_of, trace
from tests.compiler.rules.values import below, flags, real

aten = torch.ops.aten
F32 = torch.float32


def node_of(op: Any, operands: list[tuple[int, ...]], result: Any, args: Any = None, **kwargs: Any) -> fx.Node:
    """A call on f32 operands; `args` makes the arguments of the operand nodes."""
    graph = fx.Graph()
    nodes = []
    for shape in operands:
        node = graph.placeholder("x")
        node.meta["type"] = TensorType(F32, shape)
        nodes.append(node)
    made = graph.create_node("call_function", op, tuple(args(*nodes)) if args else tuple(nodes), kwargs)
    made.meta["type"] = TensorType(F32, result)
    return made


@pytest.fixture
def tables() -> Iterator[None]:
    """Leave the records as they were."""
    with records_kept():
        yield


@pytest.fixture(scope="module")
def mylib() -> Iterator[Any]:
    library = torch.library.Library("rulestest", "DEF")  # noqa: TOR901
    library.define("normalize(Tensor x, Tensor? scale=None) -> Tensor")
    library.define("fold(Tensor x, int size) -> Tensor")
    library.define("unknown(Tensor x, Tensor y) -> Tensor")

    def normalize(x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        unit = x / x.norm(dim=-1, keepdim=True)
        return unit if scale is None else unit * scale

    library.impl("normalize", normalize, "CompositeExplicitAutograd")
    library.impl("fold", lambda x, size: x.reshape(-1, size, x.shape[1]), "CompositeExplicitAutograd")
    yield torch.ops.rulestest
    library._destroy()


def test_a_users_op_takes_one_line(tables: None, mylib: Any) -> None:
    sharding_rule("rulestest.normalize", "... d, d -> ... d", whole="d")
    for sample in (
        call(mylib.normalize.default, real(4, 6)),
        call(mylib.normalize.default, real(4, 6), real(6)),
        call(mylib.normalize.default, real(4, 6), scale=real(6)),
    ):
        assert {strategy.factor for strategy in check_all(sample)} == {"", "a"}


def test_a_users_op_with_arguments_and_sizes(tables: None, mylib: Any) -> None:
    @sharding_rule("rulestest.fold")
    def fold(call: Call) -> str:
        return "(b s) d -> b s d"

    assert {strategy.factor for strategy in check_all(call(mylib.fold.default, real(12, 4), 3))} == {"", "b", "d"}


def test_a_users_localizer(tables: None, mylib: Any) -> None:
    @sharding_rule("rulestest.fold")
    def fold(call: Call) -> str:
        return "_ d -> _ s d"

    @localizer("rulestest.fold")
    def local_fold(call: LocalCall) -> Localized:
        return call.replace(size=call.result[1])

    traced = trace(call(mylib.fold.default, real(4, 6), 2))
    assert local_node(traced, Strategy((None,), (1,), "s"), "m", 2).args[1] == 1


def test_an_overload_binds_before_the_op(tables: None) -> None:
    sharding_rule("aten.mm.default", "m _, _ n -> m n")
    assert str(rule_for(node_of(aten.mm.default, [(4, 6), (6, 8)], (4, 8)), shape_of)) == "m _, _ n -> m n"


def test_an_op_without_a_rule_runs_whole(mylib: Any) -> None:
    node = node_of(mylib.unknown.default, [(4, 6), (4, 6)], (4, 6))
    rule = rule_for(node, shape_of)
    assert (str(rule), rule.reason) == ("_ _, _ _ -> _ _", "it has no sharding rule")
    assert [strategy.factor for strategy in rule.strategies(2)] == [""]


def test_a_call_that_its_rule_does_not_fit_runs_whole(tables: None, mylib: Any) -> None:
    sharding_rule("rulestest.unknown", "m k, k n -> m n")
    rule = rule_for(node_of(mylib.unknown.default, [(4, 6), (4, 6)], (4, 6)), shape_of)
    assert str(rule) == "_ _, _ _ -> _ _"
    assert rule.reason == "its sharding rule does not fit this call (factor 'k' has sizes 6 and 4: m k, k n -> m n)"


@pytest.mark.parametrize(
    ("operands", "result", "text"),
    [
        ([(4, 6), (4, 6)], (4, 6), "n _, n _ -> n _"),
        ([(4, 6), (6,)], (4,), "n _, _ -> n"),
        ([(4, 6), ()], (4, 3), "n _, [] -> n _"),
        ([(4, 6), (6, 4)], (6, 6), "_ _, n _ -> n _"),
        ([(4, 6), (4, 6)], (), None),  # no result has a dim
        ([(4, 6), (4, 6)], (3, 6), None),  # and none that an operand has
        ([(1, 6), (1, 6)], (1, 6), None),
    ],
)
def test_a_suggested_rule_passes_our_own_check(
    tables: None, mylib: Any, operands: list[tuple[int, ...]], result: tuple[int, ...], text: str | None
) -> None:
    node = node_of(mylib.unknown.default, operands, result)
    assert suggested_line(Call.of(node, shape_of)) == text
    if text is not None:
        sharding_rule("rulestest.unknown", text)
        assert rule_for(node, shape_of).reason == ""


def test_a_mask_that_picks_elements_is_refused() -> None:
    with pytest.raises(RuleError, match="a boolean mask among the indices picks as many elements as it is true"):
        rule_for(trace(call(aten.index.Tensor, real(4, 6), [flags(4)])).node, shape_of)


def test_a_malformed_rule_is_refused_where_it_is_registered(tables: None) -> None:
    with pytest.raises(RuleError) as error:
        sharding_rule("mylib.op", "m k, k n - m n")
    assert str(error.value) == (
        "the sharding rule of mylib.op does not parse\n"
        "  malformed rule, at the caret:\n"
        "    m k, k n - m n\n"
        "             ^"
    )


@pytest.mark.parametrize(
    "sample",
    [
        call(aten.native_dropout.default, real(4), 0.0, True),
        call(aten._scaled_dot_product_flash_attention_for_cpu.default, *[real(2, 2, 4, 4)] * 3),
    ],
    ids=str,
)
def test_dropout_that_is_off_has_a_rule(sample: Any) -> None:
    assert len(rule_for(trace(sample).node, shape_of).strategies(2)) > 1


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        (call(aten.native_dropout.default, real(4), 0.5, True), "aten.native_dropout.default"),
        (call(aten.rand.default, [4]), "aten.rand.default"),
        (call(aten.bernoulli.p, real(4), 0.5), "aten.bernoulli.p"),
    ],
    ids=str,
)
def test_random_numbers_of_an_ops_own_are_refused(sample: Any, name: str) -> None:
    node = trace(sample).node
    node.meta["provenance"] = Provenance(Source("/home/user/train.py", 3))
    with pytest.raises(RuleError) as error:
        rule_for(node, shape_of)
    assert str(error.value) == (
        f"train.py:3: error: {name} draws random numbers of its own, which would differ from worker to worker\n"
        "  Random numbers that are the same on any mesh come from the op `random`, which tracing puts in place of\n"
        "  torch's: decompose this op into it, or turn its dropout off."
    )


# -- operands ----------------------------------------------------------------------------------------------------------


def test_operands_are_listed_in_order_and_twice_where_given_twice() -> None:
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    for node in (x, y, z):
        node.meta["type"] = TensorType(F32, (4,))
    several = graph.create_node("call_function", aten.unbind.int, (x,), {})
    several.meta["type"] = (TensorType(F32, ()),) * 4
    made = graph.create_node("call_function", operator.add, (y, [x, None, y], 3, several), {"k": z, "l": (x,)})
    assert tensor_operands(made) == [y, x, y, z, x]


def test_keyword_operands_out_of_order() -> None:
    """Rule.operands follows the arguments as they stand, whatever the schema's order."""
    node = node_of(aten._scaled_dot_product_flash_attention_for_cpu.default, [(2, 4, 3, 8), (2, 4, 6, 8)], (2, 4, 3, 8))
    graph = node.graph
    query, key = node.args
    mask = graph.placeholder("mask")
    mask.meta["type"] = TensorType(F32, (3, 6))
    made = graph.create_node(
        "call_function", node.target, (query,), {"attn_mask": mask, "value": key, "key": key, "is_causal": False}
    )
    made.meta["type"] = (TensorType(F32, (2, 4, 3, 8)), TensorType(F32, (2, 4, 3)))
    assert str(rule_for(made, shape_of)) == "b0 h _ _, _ _, b0 h _ _, b0 h _ _ -> b0 h _ _, b0 h _"


def test_a_value_of_the_graph_where_an_op_takes_a_number() -> None:
    rule = rule_for(
        node_of(aten.addcdiv.default, [(4,), (4,), (4,), ()], (4,), lambda a, b, c, lr: (a, b, c), value=None), shape_of
    )
    assert str(rule) == "a, a, a -> a"
    node = node_of(aten.mul.Tensor, [(4, 6), ()], (4, 6))
    assert str(rule_for(node, shape_of)) == "a b, [] -> a b"
    graph = node.graph
    x, rate = node.args
    scaled = graph.create_node("call_function", aten.add.Tensor, (x, x), {"alpha": rate})
    scaled.meta["type"] = TensorType(F32, (4, 6))
    rule = rule_for(scaled, shape_of)
    assert str(rule) == "a b, a b, [] -> a b"
    assert rule.linear == (frozenset({0, 1}),)


# -- what is linear depends on numbers and dtypes ----------------------------------------------------------------------

LINEAR: list[tuple[Any, list[set[int]]]] = [
    (call(aten.mul.Tensor, real(4), real(4)), [{0}, {1}]),
    (call(aten.mul.Tensor, real(4), 2.0), [{0}]),
    (call(aten.mul.Tensor, flags(4), real(4)), [{1}]),
    (call(aten.add.Tensor, real(4), real(4)), [{0, 1}]),
    (call(aten.add.Tensor, real(4), 2.0), []),
    (call(aten.add.Tensor, real(4), 0), [{0}]),
    (call(aten.add.Tensor, flags(4), flags(4)), []),
    (call(aten.div.Tensor, real(4), real(4)), [{0}]),
    (call(aten.div.Tensor_mode, real(4), real(4), rounding_mode="trunc"), []),
    (call(aten.where.self, flags(4), real(4), real(4)), [{1, 2}]),
    (call(aten.where.ScalarOther, flags(4), real(4), 0.0), [{1}]),
    (call(aten.where.ScalarOther, flags(4), real(4), 1.0), []),
    (call(aten.masked_fill.Scalar, real(4), flags(4), 0), [{0}]),
    (call(aten.masked_fill.Scalar, real(4), flags(4), 1), []),
    (call(aten._to_copy.default, real(4), dtype=torch.float32), [{0}]),
    (call(aten._to_copy.default, real(4), dtype=torch.int64), []),
    (call(aten._to_copy.default, below(4, 4), dtype=torch.float32), [{0}]),
    (call(aten._to_copy.default, flags(4), dtype=torch.float32), []),
    (call(aten.convolution.default, real(2, 2, 3), real(2, 2, 1), None, [1], [0], [1], False, [0], 1), [{0}, {1}]),
    (
        call(aten.convolution.default, real(2, 2, 3), real(2, 2, 1), real(2), [1], [0], [1], False, [0], 1),
        [{0, 2}, {1, 2}],
    ),
    (call(aten.max.dim, real(4), 0), []),
    (call(aten.sum.default, flags(4)), []),
]


@pytest.mark.parametrize(("sample", "linear"), LINEAR, ids=str)
def test_linear(sample: Any, linear: list[set[int]]) -> None:
    rule: Rule = rule_for(trace(sample).node, shape_of)
    assert list(rule.linear) == [frozenset(together) for together in linear]
