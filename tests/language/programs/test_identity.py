"""Many objects are compared with those of before in one go."""

from __future__ import annotations

from monarch.language.programs.identity import addresses, addresses_of


class Equal:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


def test_the_same_objects_have_the_same_addresses() -> None:
    objects = [Equal() for _ in range(1000)]
    assert addresses((*objects,)) == addresses_of(map(id, objects)) == addresses((*objects,))
    assert addresses(()) == addresses_of(()) == b""


def test_equal_objects_have_other_addresses() -> None:
    first, second = Equal(), Equal()
    assert (first, second) == (second, first)
    assert addresses((first, second)) != addresses((second, first))
    assert addresses((first,)) != addresses((first, first))
