"""Numbers for objects: an address may be given to another object later, a number never is."""

import itertools
import weakref


class Serial(int):
    """The number of an object; its type tells it from other integers among a model's settings."""


class Serials:
    """Gives each object a number for as long as it lives, and holds none of them."""

    def __init__(self):
        self._count = itertools.count()
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        self._living: set[int] = set()

    def of(self, thing) -> Serial:
        """The object's number. One that can't be referred to weakly gets a new one each time: it never matches."""
        known = self._known.get(id(thing))
        if known is not None and known[0]() is thing:
            return known[1]
        number = Serial(next(self._count))
        address, table, living = id(thing), self._known, self._living

        def gone(reference):
            living.discard(number)
            if table.get(address, (None,))[0] is reference:
                del table[address]

        try:
            self._known[address] = (weakref.ref(thing, gone), number)
            self._living.add(number)
        except TypeError:
            pass
        return number

    def things(self) -> dict[int, object]:
        """The objects that live, by their numbers."""
        found = ((number, reference()) for reference, number in list(self._known.values()))
        return {number: thing for number, thing in found if thing is not None}

    def alive(self, numbers) -> bool:
        """Whether all objects of these numbers still exist."""
        return self._living.issuperset(numbers)
