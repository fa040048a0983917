"""What comes over two ways is handled in the order sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch.runtime.actors.messages.order import Numbers, Order


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_messages_of_each_sender_come_in_the_order_sent(sent: list[tuple[str, bool]], random: st.DataObject) -> None:
    """Each takes one of two ways, on each of which what is sent first comes first."""
    numbers = Numbers()
    ways: dict[tuple[str, bool], list[tuple[str, int]]] = {}
    for sender, way in sent:
        ways.setdefault((sender, way), []).append((sender, numbers.to(sender)()))
    order: Order[tuple[str, int]] = Order()
    came: list[tuple[str, int]] = []
    while any(ways.values()):
        way = random.choice([way for way in ways.values() if way])  # type: ignore[attr-defined]
        sender, number = way.pop(0)
        ready = order.take(sender, number, (sender, number))
        assert all(who == sender for who, _ in ready)
        came += ready
    for sender in "ab":
        count = sum(who == sender for who, _ in sent)
        assert [number for who, number in came if who == sender] == list(range(count))


def test_what_waits_for_a_sender_that_is_gone_waits_no_more() -> None:
    order: Order[int] = Order()
    assert order.take("a", 0, 0) == [0]
    assert order.take("a", 3, 3) == [] and order.take("a", 2, 2) == [] and order.take("b", 1, 1) == []
    assert order.gone("a", ended=True) == [2, 3]
    assert order.take("a", 5, 5) == [5] and order.take("a", 1, 1) == [1]
    assert order.take("b", 0, 0) == [0, 1]
    assert order.gone("c", ended=False) == []
