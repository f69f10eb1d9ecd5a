"""
What the index of a saved store says: records that check themselves.

Nothing is allocated, opened or taken for true before its record has been checked: numbers have bounds, names a form.
"""

import re
from dataclasses import dataclass, fields

from .cold import DTYPES
from .files import ALIGNMENT, DamagedFile
from .layout import check_geometry, is_count
from .scopes import KINDS, Place, Scope, session_scope
from .segments import DERIVED, EXACT

MAX_AMOUNT = 1e18
MAX_HOPS, MAX_CONTEXTS, MAX_DISTANCES = 1000, 1000, 1000

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


# -- what is legal --------------------------------------------------------------------------------------------------


def is_amount(value) -> bool:
    """Whether a value is a number of seconds, or of nats."""
    return type(value) in (int, float) and 0 <= value <= MAX_AMOUNT


def is_text(value, form: re.Pattern) -> bool:
    """Whether a value is a string of this form."""
    return isinstance(value, str) and form.fullmatch(value) is not None


def is_list(value, legal) -> bool:
    """Whether a value is a list of legal entries."""
    return type(value) is list and all(map(legal, value))


class Record:
    """Base of the records: made from JSON, legal or not at all."""

    @classmethod
    def read(cls, data):
        """The record that an object of JSON says; raises `DamagedFile` for one that is not legal."""
        names = [field.name for field in fields(cls)]
        if type(data) is not dict or len(data) != len(names) or not all(name in data for name in names):
            raise DamagedFile(f"the index holds no legal {cls.__name__}: {str(data)[:200]}")
        record = cls(*(data[name] for name in names))
        if not record.is_legal():
            raise DamagedFile(f"the index holds no legal {cls.__name__}: {str(data)[:200]}")
        return record


# -- records --------------------------------------------------------------------------------------------------------


@dataclass
class FileRecord(Record):
    """A file with rows: its name and its bytes."""

    name: str
    size: int

    def is_legal(self) -> bool:
        """Whether all fields are what they may be. (That names are names, opening a file checks.)"""
        return isinstance(self.name, str) and is_count(self.size, 1, 2**62)


@dataclass
class TokensRecord(Record):
    """The file with the tokens: name, bytes, and how many entries each of its arrays has."""

    name: str
    size: int
    texts: int
    numbers: int
    flags: int
    reach: int

    def is_legal(self) -> bool:
        """Whether all fields are what they may be."""
        counts = (self.texts, self.numbers, self.flags, self.reach)
        return isinstance(self.name, str) and all(is_count(count, 0, 2**40) for count in (self.size, *counts))


@dataclass
class SegmentRecord(Record):
    """
    One segment. Its positions are the next `rows` numbers, its reach the next `rows * distances` halves, and the rows
    that each of its contexts gave (of a mean) the next `rows` flags each.

    Args:
        text (`int`), length (`int`): Where its context begins among the texts, and its tokens.
        rows (`int`): Its rows.
        state (`str`), hops (`int`): As in `Segment`.
        unused (`float`), age (`float`): Seconds since it was used, and since it was made.
        findable (`bool`): Whether it is in the index of windows.
        distances (`int`): Entries of its reach in each row; 0: it has none.
        contexts (list of `str`), shared_left (`int`): Of a mean, see `Copies`; an empty list: it is none.
        cold (`str`, *optional*): Dtype of its rows where that is smaller than the model's.
        file (`int`), offset (`int`): Which file its rows lie in, and where they begin.
        checksum (`str`): Of its bytes there.
        uses (`float`), recent (`float`): How often it was asked for, see `Uses`.
    """

    text: int
    length: int
    rows: int
    state: str
    hops: int
    unused: float
    age: float
    findable: bool
    distances: int
    contexts: list
    shared_left: int
    cold: str | None
    file: int
    offset: int
    checksum: str
    uses: float
    recent: float

    def is_legal(self) -> bool:
        """Whether all fields are what they may be."""
        return (
            is_count(self.text, 0, 2**40)
            and is_count(self.length, 1)
            and is_count(self.rows, 1, self.length)
            and self.state in (EXACT, DERIVED)
            and is_count(self.hops, 0, MAX_HOPS)
            and is_amount(self.unused)
            and is_amount(self.age)
            and type(self.findable) is bool
            and is_count(self.distances, 0, MAX_DISTANCES)
            and is_list(self.contexts, lambda each: is_text(each, _FINGERPRINT))
            and len(set(self.contexts)) == len(self.contexts) <= MAX_CONTEXTS
            and is_count(self.shared_left)
            and (self.cold is None or (isinstance(self.cold, str) and self.cold in DTYPES))
            and is_count(self.file)
            and is_count(self.offset, 1, 2**62)
            and self.offset % ALIGNMENT == 0
            and is_text(self.checksum, _DIGEST)
            and is_amount(self.uses)
            and is_amount(self.recent)
        )


@dataclass
class DriftRecord(Record):
    """
    One `Correction`: the next numbers are its anchors, its targets, `run_start` of each of its `tokens`, and which,
    offset and shift of its `sources`; the next `targets` flags say which of these are kept.
    """

    anchors: int
    targets: int
    tokens: int
    sources: int

    def is_legal(self) -> bool:
        """Whether all fields are what they may be."""
        return all(map(is_count, (self.anchors, self.targets, self.tokens))) and is_count(
            self.sources, 0, self.anchors
        )


@dataclass
class SequenceRecord(Record):
    """
    One sequence. The next numbers are which, offset and shift of its rows, `length` each, then those of its drifts.

    Args:
        text (`int`), length (`int`): Where its tokens begin among the texts, and how many they are.
        exact (`int`), prompt_length (`int`), hops (`int`), expected_kl (`float`, *optional*): As in `Sequence`.
        unused (`float`): Seconds since it was used.
        segments (list of `int`): Numbers of the segments of its recipe.
        drifts (list of `DriftRecord`): Of its recipe.
        pinned (`bool`): Whether it is never given up for room.
    """

    text: int
    length: int
    exact: int
    prompt_length: int
    hops: int
    expected_kl: float | None
    unused: float
    segments: list
    drifts: list
    pinned: bool

    def is_legal(self) -> bool:
        """Whether all fields are what they may be; the drifts become records."""
        if type(self.drifts) is not list:
            return False
        self.drifts = [DriftRecord.read(each) for each in self.drifts]
        return (
            is_count(self.text, 0, 2**40)
            and is_count(self.length, 1)
            and is_count(self.exact, 0, self.length)
            and is_count(self.prompt_length, 0, self.length)
            and is_count(self.hops, 0, MAX_HOPS)
            and (self.expected_kl is None or is_amount(self.expected_kl))
            and is_amount(self.unused)
            and is_list(self.segments, is_count)
            and len(set(self.segments)) == len(self.segments) > 0
            and type(self.pinned) is bool
        )


@dataclass
class SessionRecord(Record):
    """What is known of a session: how long its rows live unused, and how long ago it left its topic."""

    ttl: float | None
    left_topic: float | None

    def is_legal(self) -> bool:
        """Whether all fields are what they may be."""
        return all(each is None or is_amount(each) for each in (self.ttl, self.left_topic))


@dataclass
class ShelfRecord(Record):
    """
    One shelf: whose rows they are, of what shape, and what is on it.

    Args:
        digest (`str`), settings (`str`): The identity, as another process has it too.
        place (`dict`): Scope and conditions, see `place_record`.
        geometry (`dict`): See `geometry_of`.
        session (`SessionRecord`, *optional*): If its scope is one.
        segments (list of `SegmentRecord`): Numbered from shelf to shelf.
        means (list of `int`): Numbers of those of its segments that are means.
        sequences (list of `SequenceRecord`): Which refer to segments of this shelf, and of the shared one beside.
    """

    digest: str
    settings: str
    place: dict
    geometry: dict
    session: SessionRecord | None
    segments: list
    means: list
    sequences: list

    def is_legal(self) -> bool:
        """Whether all fields are what they may be; what is in them becomes records, and the place a `Place`."""
        lists = (self.segments, self.sequences)
        if not all(type(each) is list for each in lists) or not is_list(self.means, is_count):
            return False
        self.place = read_place(self.place)
        self.session = None if self.session is None else SessionRecord.read(self.session)
        self.segments = [SegmentRecord.read(each) for each in self.segments]
        self.sequences = [SequenceRecord.read(each) for each in self.sequences]
        check_geometry(self.geometry)
        return is_text(self.digest, _DIGEST) and is_text(self.settings, _DIGEST)


def place_record(place: Place) -> dict:
    """A place as JSON."""
    regime = None if place.regime is None else place.regime.hex()
    return {**place.scope._asdict(), "regime": regime, "with_types": place.with_types}


def read_place(data) -> Place:
    """The inverse of `place_record`; raises `DamagedFile` for what is no place."""
    try:
        kind, namespace, session = data["kind"], data["namespace"], data["session"]
        regime, with_types = data["regime"], data["with_types"]
        if kind not in KINDS or not isinstance(namespace, str) or type(with_types) is not bool or len(data) != 5:
            raise ValueError("its fields are not what they may be")
        if kind != "session" and session is not None:
            raise ValueError("only sessions have an id")
        scope = session_scope(namespace, session) if kind == "session" else Scope(kind, namespace)
        return Place(scope, None if regime is None else bytes.fromhex(regime), with_types)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"the index holds no legal place: {str(data)[:200]} ({error})") from error
