"""The text of rules: what parses, how it binds to shapes, how rules print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.rules import Rule, Strategy
from monarch.compiler.rules.line import ELLIPSIS, LineError, bind, factor_names, line, parse_line

PARSES = {
    "m k, k n -> m n": (((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),)),
    "(b t) d -> b t d": (((("b", "t"), ("d",)),), ((("b",), ("t",), ("d",)),)),
    "... d, [] -> ... d, -": (((ELLIPSIS, ("d",)), ()), ((ELLIPSIS, ("d",)), None)),
    "n _ -> n": (((("n",), ()),), ((("n",),),)),
    "-> a": ((), ((("a",),),)),
    "->": ((), ()),
}


@pytest.mark.parametrize("text", PARSES)
def test_parse(text: str) -> None:
    assert parse_line(text) == PARSES[text]


MALFORMED = {
    "m k k n": "malformed rule, at the caret:\n  m k k n\n         ^",
    "m, -> n": "malformed rule, at the caret:\n  m, -> n\n      ^",
    "(m -> m": "malformed rule, at the caret:\n  (m -> m\n     ^",
    "m * n -> m": "malformed rule, at the caret:\n  m * n -> m\n    ^",
    "-, a -> a": "only a result can be missing (-): -, a -> a",
    "... a ... -> a": "a tensor can have one ellipsis: ... a ... -> a",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed(text: str) -> None:
    with pytest.raises(LineError) as error:
        parse_line(text)
    assert str(error.value) == MALFORMED[text]


# text, operands' shapes, results' shapes, the rule as it prints, sizes
BINDS = [
    ("m k, k n -> m n", [(4, 6), (6, 8)], [(4, 8)], "m k, k n -> m n", {"m": 4, "k": 6, "n": 8}),
    ("..., ... -> ...", [(4, 6), (6,)], [(4, 6)], "a b, b -> a b", {"a": 4, "b": 6}),
    ("..., ... -> ...", [(4, 1), (1, 6)], [(4, 6)], "a _, _ b -> a b", {"a": 4, "b": 6}),
    ("..., ... -> ...", [(), ()], [()], "[], [] -> []", {}),
    ("... a, a -> ... a", [(2, 3, 4), (4,)], [(2, 3, 4)], "b c a, a -> b c a", {"b": 2, "c": 3, "a": 4}),
    ("(g i) _, g -> g i", [(6, 5), (2,)], [(2, 3)], "(g i) _, g -> g i", {"g": 2, "i": 3}),
    ("n -> n, -", [(4,)], [(4,), None], "n -> n, -", {"n": 4}),
    ("n -> n, n", [(4,)], [(4,), None], "n -> n, -", {"n": 4}),
]


@pytest.mark.parametrize(("text", "operands", "results", "printed", "sizes"), BINDS)
def test_bind(text: str, operands: list, results: list, printed: str, sizes: dict[str, int]) -> None:
    rule = bind(line(text), operands, results)
    assert str(rule) == printed
    assert rule.sizes == sizes


MISFITS = [
    ("m k, k n -> m n", [(4, 6)], [(4, 8)], "the rule has 2 operands and 1 results, the call 1 and 1"),
    ("m k -> m", [(4,)], [(4,)], "a tensor of shape [4] where the rule has 2 dims"),
    ("m -> m", [(4, 6)], [(4,)], "a tensor of shape [4, 6] where the rule has 1 dims"),
    ("m, m -> m", [(4,), (6,)], [(4,)], "factor 'm' has sizes 4 and 6"),
    ("m -> m", [(4,)], [(1,)], "a result has size 1 along 'm', which has size 4"),
    ("(a b) -> (a b)", [(6,)], [(6,)], "no shape tells the sizes of a, b"),
    ("(a b) -> a b", [(6,)], [(2, 2)], "a dim of size 6 is not a (2) * b (2)"),
]


@pytest.mark.parametrize(("text", "operands", "results", "message"), MISFITS)
def test_misfit(text: str, operands: list, results: list, message: str) -> None:
    with pytest.raises(LineError) as error:
        bind(line(text), operands, results)
    assert str(error.value) == f"{message}: {text}"


def test_whole_prints_and_is_not_sharded() -> None:
    rule = bind(line("... d -> ... d", whole="d"), [(4, 6)], [(4, 6)])
    assert str(rule) == "a d -> a d; whole d"
    assert [strategy.factor for strategy in rule.strategies(2)] == ["", "a"]


def test_whole_ellipsis() -> None:
    rule = bind(line("... d -> ... d", whole="..."), [(4, 2, 6)], [(4, 2, 6)])
    assert [strategy.factor for strategy in rule.strategies(2)] == ["", "d"]


def test_only_leading_factors_are_sharded() -> None:
    rule = bind(line("b t -> (b t)"), [(4, 6)], [(24,)])
    assert rule.strategies(2) == [Strategy((None,), (None,), ""), Strategy((0,), (0,), "b")]
    # Once the leading factor is used up, the next one leads.
    rule = bind(line("b t -> (b t)"), [(1, 6)], [(6,)])
    assert rule.strategies(2) == [Strategy((None,), (None,), ""), Strategy((1,), (0,), "t")]


def test_k_must_divide_the_factor() -> None:
    rule = bind(line("m k, k n -> m n"), [(4, 6), (6, 9)], [(4, 9)])
    assert [[strategy.factor for strategy in rule.strategies(k)] for k in (2, 3, 4, 5)] == [
        ["", "m", "k"],
        ["", "k", "n"],
        ["", "m"],
        [""],
    ]


def test_a_factor_twice_in_one_tensor_is_not_sharded() -> None:
    rule = bind(line("i i -> i"), [(4, 4)], [(4,)])
    assert [strategy.factor for strategy in rule.strategies(2)] == [""]


def test_reductions() -> None:
    def factors(reduce: str) -> list[Strategy]:
        return bind(line("a b -> a", reduce=reduce), [(4, 6)], [(4,)]).strategies(2)

    assert factors("max")[2] == Strategy((1,), ("max",), "b")
    assert factors("sum")[2] == Strategy((1,), ("sum",), "b")


def test_a_factor_without_reduction_is_not_sharded() -> None:
    rule = Rule(((("a",), ("b",)),), ((("a",),),), {"a": 4, "b": 6})
    assert [strategy.factor for strategy in rule.strategies(2)] == ["", "a"]


def test_addends_are_partial_where_the_reduction_is() -> None:
    rule = bind(line("n, m k, k n -> m n", addends=[0]), [(8,), (4, 6), (6, 8)], [(4, 8)])
    assert {strategy.factor: strategy.operands for strategy in rule.strategies(2)} == {
        "": (None, None, None),
        "n": (0, None, 1),
        "m": (None, 0, None),
        "k": ("sum", 1, 0),
    }
    maximum = bind(line("n, m n -> n", addends=[0], reduce="max"), [(8,), (4, 8)], [(8,)])
    assert [strategy.factor for strategy in maximum.strategies(2)] == ["", "n"]


def test_kept_results_stay_replicated() -> None:
    rule = bind(line("n c -> n, c", kept=[("n", 1)], whole="c"), [(4, 6)], [(4,), (6,)])
    assert rule.strategies(2)[1] == Strategy((0,), (0, None), "n")


def test_linear() -> None:
    rule = bind(line("a, a -> a, -", linear=[{0, 1}]), [(3,), (3,)], [(3,), None])
    assert rule.strategies(2)[1:] == [Strategy(("sum", "sum"), ("sum", None), "partial")]


@given(st.integers(0, 60), st.sets(st.sampled_from("abcxyz")))
def test_factor_names(count: int, taken: set[str]) -> None:
    names = factor_names(count, taken)
    assert len(set(names)) == count
    assert not taken & set(names)
    assert all(parse_line(f"{name} -> {name}") for name in names)
