"""The identities of each model, as its weights, adapters and settings come and go."""

import functools
import hashlib
import operator
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .adapters import Adapters
from .portable import portable
from .sample import Sample
from .serials import Serials
from .settings import Reading, Scan, Stale, effective_modules

KEPT = 8  # identities of a model that are known at a time: adapters are switched to and fro
SAMPLE_TOKENS = 200  # prompts above this pay for a look at the weights themselves, wherever these are


@dataclass(eq=False)
class Identity:
    """
    One state of one model. Rows are stored under the identity that computed them.

    Args:
        model (`weakref.ref`): The model.
        digest (`str`): Hash of sampled elements of all tensors that act; equal in every process for equal weights.
        settings (`str`): Hash of everything else that was read; equal for models of one class and config in one
            process that have no hooks or forwards of their own.
        references (`list[weakref.ref]`): To each of the tensors: tells a new tensor at the address of a freed one.
        places (`list[tuple]`): Address, version counter and strides of each.
        values (`list`), hooks (`list`), serials (`list`): See `Reading`.
        sample (`Sample`): Which elements the digest is made of.
        known (`Serials`): Who gave the numbers.
    """

    model: weakref.ref
    digest: str
    settings: str
    references: list = field(repr=False)
    places: list = field(repr=False)
    values: list = field(repr=False)
    hooks: list = field(repr=False)
    serials: list = field(repr=False)
    sample: Sample = field(repr=False)
    known: Serials = field(repr=False)

    @functools.cached_property
    def portable(self) -> str | None:
        """`settings` as another process has them too; None where that can't be told, so that rows are not saved."""
        return portable(self.values, self.hooks, self.serials, self.known)

    def matches(self, reading: Reading, places: list) -> bool:
        """Whether the model is in this state."""
        return (
            self.values == reading.values
            and self.serials == reading.serials
            and self.hooks == reading.hooks
            and self.places == places
            and all(map(operator.is_, [reference() for reference in self.references], reading.tensors))
        )

    def can_return(self, hooks: set, serials: Serials) -> bool:
        """Whether tensors, hooks and functions of this state are all still there and as they were."""
        if not hooks.issuperset(self.hooks) or not serials.alive(self.serials):
            return False
        tensors = [reference() for reference in self.references]
        return not any(tensor is None for tensor in tensors) and _places(tensors) == self.places


@dataclass(eq=False)
class _Known:
    """What is known of one model: its identities, the current one last."""

    adapters: Adapters = field(default_factory=Adapters)
    scan: Scan | None = None
    identities: list[Identity] = field(default_factory=list)


class IdentityTable:
    """
    The current identity of each model. Holds no model, tensor, hook or function.

    Args:
        attention (callable): Gives the attention implementation that a model has when no pass of ours is open.
    """

    def __init__(self, attention: Callable[[torch.nn.Module], str]):
        self._attention = attention
        self._lock = threading.RLock()  # two threads at a model's first use must get one identity
        self._serials = Serials()
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()

    def get(self, model: torch.nn.Module, tokens: int) -> tuple[Identity, list[Identity]]:
        """
        The model's identity now, and those of its identities that can never return.

        Args:
            tokens (`int`): Tokens of the prompt; a longer one is worth a closer look.
        """
        with self._lock:
            known = self._known.setdefault(model, _Known())
            reading = self._read(model, known)
            places = _places(reading.tensors)
            found = next((each for each in reversed(known.identities) if each.matches(reading, places)), None)
            latest = found is not None and found is known.identities[-1]
            if latest and tokens <= SAMPLE_TOKENS and not found.sample.is_cheap:
                return found, []
            if found is not None and found.sample.digest(reading.tensors) == found.digest:
                if latest:
                    return found, []
                gone = self._forget_lost(known, reading, keep=found)
            elif found is not None:
                # written to without a version: what else was known of these tensors is as doubtful
                gone, known.identities = known.identities, []
            else:
                gone = self._forget_lost(known, reading)
            if not known.identities or found not in known.identities:
                found = self._make(model, reading, places)
            known.identities = [each for each in known.identities if each is not found] + [found]
            gone += known.identities[:-KEPT]
            known.identities = known.identities[-KEPT:]
            return found, gone

    def lost(self, identity: Identity) -> bool:
        """Whether the model is gone."""
        return identity.model() is None

    def _read(self, model: torch.nn.Module, known: _Known) -> Reading:
        for _ in range(3):
            reading = Reading()
            modules = effective_modules(model, known.adapters, reading)
            if known.scan is None or not known.scan.fits(modules):
                known.adapters.forget_dead()
                known.scan = Scan(modules, self._serials)
            try:
                known.scan.read(modules, reading)
            except Stale:
                known.scan = None
                continue
            reading.values.append(self._attention(model))
            return reading
        raise RuntimeError(f"the attributes of this {type(model).__name__} change while they are read")

    def _make(self, model: torch.nn.Module, reading: Reading, places: list) -> Identity:
        sample = Sample(reading.tensors)
        settings = repr((reading.values, reading.hooks, reading.serials)).encode()
        return Identity(
            weakref.ref(model),
            sample.digest(reading.tensors),
            hashlib.blake2b(settings, digest_size=16).hexdigest(),
            [weakref.ref(tensor) for tensor in reading.tensors],
            places,
            reading.values,
            reading.hooks,
            reading.serials,
            sample,
            self._serials,
        )

    def _forget_lost(self, known: _Known, reading: Reading, keep: Identity | None = None) -> list[Identity]:
        """Drop the identities that can never return."""
        hooks = set(reading.hooks)
        gone = [each for each in known.identities if each is not keep and not each.can_return(hooks, self._serials)]
        known.identities = [each for each in known.identities if each not in gone]
        return gone


def _places(tensors: list[torch.Tensor]) -> list[tuple]:
    """Address, version counter and strides; a tensor made in inference mode has no counter (-1)."""
    try:
        return [(tensor.data_ptr(), tensor._version, tensor.stride()) for tensor in tensors]
    except RuntimeError:  # some are inference tensors, or have neither an address nor strides
        return [_place(tensor) for tensor in tensors]


def _place(tensor: torch.Tensor) -> tuple:
    version = -1 if tensor.is_inference() else tensor._version
    try:
        return tensor.data_ptr(), version, tensor.stride()
    except (RuntimeError, NotImplementedError):
        return 0, version, ()
