"""What is known of an op's overload, held from its first call on."""

import torch

from monarch.compiler.ops.record import enter, records_kept
from monarch.language.tensors.facts import facts_of

aten = torch.ops.aten


def test_what_is_entered_later_is_known_and_forgotten_behind_a_block():
    held = [facts_of(aten.add.Tensor), facts_of(aten.trace.default)]
    before = [facts.known.shape for facts in held]
    with records_kept():
        enter((aten.add, aten.trace), shape=max)
        assert [facts.known.shape for facts in held] == [max, max]
    assert [facts.known.shape for facts in held] == before


def test_a_users_op_may_get_a_composite_kernel_behind_its_first_call():
    library = torch.library.Library("monarch_test_facts", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    twice = torch.ops.monarch_test_facts.twice.default
    assert not facts_of(twice).composite
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    assert facts_of(twice).composite
    assert facts_of(aten.matmul.default).composite and not facts_of(aten.mm.default).composite


def test_the_schema_says_what_moves_what_is_written_and_what_is_viewed():
    def said(func):
        facts = facts_of(func)
        return facts.moves, facts.mutable, facts.view

    assert said(aten.squeeze_.default) == (True, True, False)
    assert said(aten.add_.Tensor) == (False, True, False)
    assert said(aten.t.default) == (False, False, True)
    assert said(aten.mm.default) == (False, False, False)
