"""How the soak tells a right answer from a wrong one, and what its threads share to do so."""

import logging
import threading
from contextlib import contextmanager

import torch

from benchmarks import soak_traffic  # noqa: F401  it finds the tests' modules
from reference import TOLERANCE, Answer, first_decoder_layer

LARGEST = 1e-3  # difference of logits that rounding is ever taken for


class Gate:
    """Many may be inside at a time, or one alone: `shared()` and `alone()`. Who wants to be alone goes first."""

    def __init__(self):
        self._condition = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._alone = False

    @contextmanager
    def shared(self):
        with self._condition:
            self._condition.wait_for(lambda: not self._alone and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    @contextmanager
    def alone(self):
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: not self._alone and not self._inside)
            self._waiting -= 1
            self._alone = True
        try:
            yield
        finally:
            with self._condition:
                self._alone = False
                self._condition.notify_all()


class RowsOfThread:
    """Counts the rows that a model's first decoder layer runs, for each thread apart."""

    def __init__(self, model):
        self._counts = threading.local()
        first_decoder_layer(model).register_forward_hook(self._count, with_kwargs=True)

    def _count(self, layer, args, kwargs, output):
        hidden = args[0] if args else kwargs["hidden_states"]
        self._counts.rows = getattr(self._counts, "rows", 0) + hidden.shape[0] * hidden.shape[1]

    def take(self) -> int:
        """Rows of this thread since it asked last."""
        rows, self._counts.rows = getattr(self._counts, "rows", 0), 0
        return rows


class Warnings(logging.Handler):
    """Takes what the package warns of, hints left out: it goes on after a fault of its own, which is one here."""

    HINTS = ("this answer is approximate", "of the newest", "dropped after one call", "models with hooks")

    def __init__(self, take):
        super().__init__(logging.WARNING)
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not any(hint in message for hint in self.HINTS):
            cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
            self._take("warning", message + cause)


def difference(got: Answer, want: Answer, greedy: bool = True) -> tuple[float, bool]:
    """
    The largest difference of the logits of two answers to one prompt, as long as they have said the same, and whether
    they part where two tokens are as likely as each other; raises `AssertionError` where they part elsewhere.
    """
    worst, parted = 0.0, False
    assert len(got.scores) == len(want.scores), f"{len(got.scores)} steps instead of {len(want.scores)}"
    for row in range(want.scores[0].shape[0]):
        gap = float("inf")
        for ids, scores, other_ids, other in zip(got.seen, got.scores, want.seen, want.scores, strict=True):
            if ids[row].tolist() != other_ids[row].tolist():
                assert gap < 2 * TOLERANCE or not greedy, f"other tokens, although {gap:.2e} apart"
                parted = True
                break
            apart = (scores[row] - other[row]).masked_fill(scores[row] == other[row], 0.0).abs().max().item()
            assert apart == apart, "NaN in an answer"
            worst = max(worst, apart)
            top = other[row].topk(2).values
            gap = float(top[0] - top[1])
        else:
            if greedy and got.ids[row].tolist() != want.ids[row].tolist():
                assert gap < 2 * TOLERANCE, f"another last token, although {gap:.2e} apart"
                parted = True
    if not greedy and not parted:
        assert got.ids.tolist() == want.ids.tolist(), "other tokens"
    assert worst < LARGEST, f"max abs logit difference {worst:.2e}"
    return worst, parted


def finite(answer: Answer) -> None:
    """No step of an answer may hold a NaN."""
    assert not any(torch.isnan(step).any() for step in answer.scores), "NaN in an answer"
