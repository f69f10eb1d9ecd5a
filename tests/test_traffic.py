"""Random traffic on one cache: every oracle after every request, whatever ran before."""

import numpy as np
import pytest
import torch

from hf_suffix_cache import SuffixCache
from reference import (
    ask,
    check_pool,
    check_report,
    first_layer_is_fresh,
    forgets_everything,
    same_answer,
    served_rows,
    work_is_reported,
)
from tiny_models import CORE, make_model, new_text, old_text

TEXTS = [old_text(length, 40 + length) for length in (17, 23, 31, 40, 55)]
ROW = 3 * 2 * 2 * 16 * 4  # bytes: layers x (keys, values) x kv heads x head_dim x fp32


class Traffic:
    """Draws requests: pieces of a few texts in any order, earlier conversations that go on, repetitions, new text."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.history: list[list[int]] = [TEXTS[0] + TEXTS[1]]

    def prompt(self) -> list[int]:
        draw = self.random.random()
        if draw < 0.15:
            return self._earlier()
        if draw < 0.45:
            return self._earlier() + self._new(int(self.random.integers(1, 50)))
        if draw < 0.6:
            earlier = self._earlier()
            return earlier[: int(self.random.integers(1, len(earlier) + 1))] + self._new(20)
        ids = self._new(int(self.random.integers(0, 12)))
        for _ in range(int(self.random.integers(1, 5))):
            text = TEXTS[int(self.random.integers(len(TEXTS)))]
            start = int(self.random.integers(0, 8)) if self.random.random() < 0.4 else 0
            ids = ids + text[start:] + self._new(int(self.random.integers(0, 4)))
        return ids + self._new(int(self.random.integers(1, 45)))

    def keep(self, tokens: list[int]) -> None:
        if len(tokens) < 260:
            self.history = [*self.history[-9:], tokens]

    def _earlier(self) -> list[int]:
        return list(self.history[int(self.random.integers(len(self.history)))])

    def _new(self, length: int) -> list[int]:
        return new_text(length, int(self.random.integers(40)))


def _one(traffic, model, handle, fidelity: str) -> None:
    """One prompt alone: O1 in exact mode, O2, O4, and the report."""
    ids, steps = traffic.prompt(), int(traffic.random.integers(1, 6))
    model.spy.clear()
    if traffic.random.random() < 0.3:
        got, rows = served_rows(model, ids, handle, steps=steps)
        work_is_reported(model, got, decoded_rows=steps - 1)
        first_layer_is_fresh(model, rows, ids)
    else:
        got = ask(model, ids, handle, steps=steps)
        work_is_reported(model, got, decoded_rows=steps - 1)
    check_report(got.report)
    assert got.report.prompt_tokens == len(ids)
    if fidelity == "exact" or not (got.report.carried_tokens or got.report.shifted_tokens):
        same_answer(got, ask(model, ids, steps=steps))
    else:
        assert all(torch.isfinite(step).all() for step in got.scores)
    traffic.keep(got.tokens())


def _several(traffic, model, handle, fidelity: str) -> None:
    """A left-padded batch, greedy, sampled or with beams."""
    rows = [traffic.prompt() for _ in range(int(traffic.random.integers(2, 4)))]
    width = max(map(len, rows))
    options = {
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        "pad_token_id": 2,
        "steps": 3,
        **[{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}][int(traffic.random.integers(3))],
    }
    ids = torch.tensor([[2] * (width - len(row)) + row for row in rows])
    model.spy.clear()
    got = ask(model, ids, handle, seed=1, **options)
    multiple = options.get("num_beams", 1) * options.get("num_return_sequences", 1)
    work_is_reported(model, got, decoded_rows=2 * multiple * len(rows))
    check_report(got.report)
    assert got.report.prompt_tokens == sum(map(len, rows))
    if fidelity == "exact" or not (got.report.carried_tokens or got.report.shifted_tokens):
        same_answer(got, ask(model, ids, seed=1, **options))


@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("rows", [None, 900], ids=["roomy", "evicting"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 15))])
def test_every_oracle_holds_under_random_traffic(kind, rows, seed):
    model, traffic = make_model(kind, spy=True), Traffic(seed)
    budget = None if rows is None else rows * ROW
    keep, block = ((4, 16), (1, 5), (0, 1))[seed % 3]
    cache = SuffixCache(max_bytes=budget, keep_conversations=keep, block_size=block)
    for number in range(60):
        fidelity = str(traffic.random.choice(["exact", "balanced", "fast"]))
        request = _several if traffic.random.random() < 0.2 else _one
        request(traffic, model, cache.using(fidelity=fidelity), fidelity)
        check_pool(cache)
        if number % 20 == 19:
            cache.compact()
            check_pool(cache)
    assert cache.stats.hit_rate > 0.1
    assert (cache.stats.evictions > 0) is (rows is not None)
    forgets_everything(cache)
