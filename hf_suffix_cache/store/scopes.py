"""Who may reuse a row: the scope that it belongs to, a tagged part of a shelf's key that never enters a hash."""

from numbers import Integral
from typing import NamedTuple

from ..config import short

KINDS = ("anonymous", "session", "shared")
MOST_ID = 2**64 - 1  # Python refuses to write integers of more than 4,300 digits, so an index could not hold them


class Scope(NamedTuple):
    """
    The texts that may meet. What is shared is seen by all scopes of its namespace, and sees nothing but itself: the
    provenance of a shared row is shared text alone. The anonymous scope and each session see their own rows beside.

    Args:
        kind (`str`): `"anonymous"`, `"session"` or `"shared"`. The tag keeps apart what would be equal without it.
        namespace (`str`): A salt of the caller's.
        session (`str` or `int`, *optional*): Of a session, its id. `1` and `"1"` are different ones.
    """

    kind: str
    namespace: str = ""
    session: str | int | None = None

    @property
    def beside(self) -> "Scope | None":
        """The shared scope that this one sees too; None for the shared one itself."""
        return None if self.kind == "shared" else Scope("shared", self.namespace)


ANONYMOUS = Scope("anonymous")


class Place(NamedTuple):
    """
    Which rows of an identity may meet: those of one scope that were computed under the same conditions.

    Args:
        scope (`Scope`): Whose rows.
        regime (`bytes`, *optional*): Of rotary frequencies that depend on the length of the text.
        with_types (`bool`): Whether token types, all 0, came with the text.
    """

    scope: Scope = ANONYMOUS
    regime: bytes | None = None
    with_types: bool = False

    @property
    def beside(self) -> "Place | None":
        """The shared place that this one sees too."""
        scope = self.scope.beside
        return None if scope is None else self._replace(scope=scope)


def session_scope(namespace: str, session: str | int) -> Scope:
    """The scope of a session's id; raises `TypeError` or `ValueError` for what is none."""
    if isinstance(session, bool) or not isinstance(session, (str, Integral)):
        raise TypeError(f"a session's id must be a string or an integer, got {short(session)}.")
    session = session if isinstance(session, str) else int(session)  # numpy's integers are the numbers they are
    if isinstance(session, int) and not -MOST_ID <= session <= MOST_ID:
        raise ValueError(
            f"a session's id must be a string or an integer of 64 bits, got one of {len(hex(session)):,}"
            " hexadecimal digits; give it as a string."
        )
    if session == "":
        raise ValueError("a session's id must not be empty: rows of all callers without an id would meet in it.")
    return Scope("session", namespace, session)
