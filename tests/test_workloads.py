"""The fidelity benchmark's own arithmetic: prompts that a seed decides, scores, intervals, rows of a walk. No fetching."""  # noqa: E501

import random
import re

import numpy as np
import pytest

from benchmarks import scores, workloads
from benchmarks.fidelity_bound import Traced, cheapest, direct_rows, folds, walk_rows
from benchmarks.sources import Country, Question, Tools
from hf_suffix_cache.bound.features import LEVELS, LevelTrace

WORDS = "river stone market engine winter harbour painter senate copper valley orchard signal theatre comet".split()


class Words:
    """A tokenizer of words and single signs, with a chat template or without."""

    def __init__(self, chat: bool):
        self.chat_template = "roles" if chat else None
        self.ids: dict[str, int] = {}

    def __call__(self, text, add_special_tokens=True, return_offsets_mapping=False):
        found = list(re.finditer(r"[A-Za-z0-9_]+|.", text, re.DOTALL))
        ids = [self.ids.setdefault(match.group(), len(self.ids) + 1) for match in found]
        special = [0] if add_special_tokens else []
        return {"input_ids": special + ids, "offset_mapping": [(0, 0)] * len(special) + [m.span() for m in found]}

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and not tokenize
        return "".join(f"<{item['role']}>\n{item['content']}\n" for item in messages) + "<assistant>\n"


def sentence(rng: random.Random, characters: int) -> str:
    text = ""
    while len(text) < characters:
        text += f" {rng.choice(WORDS)}"
    return text.strip().capitalize() + "."


def corpora() -> dict:
    rng = random.Random(5)

    def paragraph(characters: int) -> str:
        return " ".join(sentence(rng, 60) for _ in range(characters // 62))

    questions = tuple(Question(f"What is the {word}?", (word,)) for word in WORDS[:3])
    articles = {f"article {n}": [(paragraph(400), questions) for _ in range(12)] for n in range(7)}
    schemas = [f'{{"name": "tool_{n}", "description": "{sentence(rng, 320)}"}}' for n in range(12)]
    reviews = [(paragraph(200), rng.choice(list(workloads.MOODS))) for _ in range(40)]
    return {
        "passages": articles,
        "references": [Country(f"Land{n}", f"Land{n}. {paragraph(200)}", f"Town{n}") for n in range(20)],
        "chat": [[paragraph(190) for _ in range(15)] for _ in range(10)],
        "edited": [" ".join(sentence(rng, 60) for _ in range(90)) for _ in range(4)],
        "few-shot": reviews,
        "tools": [
            Tools(f"Use tool {n}", tuple(rng.sample(schemas, 4)), (f"tool_{n}",)) for n in range(6) for _ in range(2)
        ],
        "needle": [" ".join(sentence(rng, 100) for _ in range(200)) for _ in range(4)],
        "chinese": [(f"第{n}条" + "好" * 50, "positive") for n in range(40)],
    }


def occurs(piece: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    return any(ids[at : at + len(piece)] == piece for at in range(len(ids) - len(piece) + 1))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_cases_share_their_pieces_with_the_stored_request(name, chat):
    found = workloads.cases(name, Words(chat), 6, corpus=corpora()[name])
    for case in found:
        assert case.alone and all(len(piece) >= 8 for piece in case.alone)
        assert all(occurs(piece, case.measured) for piece in case.alone)
        assert all(occurs(piece, case.stored[0]) for piece in case.alone)
        # not vacuous: the requests differ before the first shared piece is over, so something has to be moved
        assert case.measured != case.stored[0] and case.measured[: len(case.stored[0])] != case.stored[0]


@pytest.mark.parametrize("name", list(workloads.WORKLOADS))
def test_cases_are_decided_by_the_seed(name):
    corpus = corpora()[name]
    first = workloads.cases(name, Words(True), 6, seed=3, corpus=corpus)
    assert first == workloads.cases(name, Words(True), 6, seed=3, corpus=corpus)
    assert first[:3] == workloads.cases(name, Words(True), 3, seed=3, corpus=corpus)
    assert first != workloads.cases(name, Words(True), 6, seed=4, corpus=corpus)


def test_cases_of_share_one_have_a_group_each():
    found = workloads.cases("passages", Words(True), 5, share=1, corpus=corpora()["passages"])
    assert len({case.group for case in found}) == 5
    shared = workloads.cases("passages", Words(True), 8, share=4, corpus=corpora()["passages"])
    assert len({case.group for case in shared}) == 2 and len({case.stored for case in shared}) == 2


def test_references_answer_is_the_capital_above():
    tokenizer = Words(False)
    corpus = corpora()["references"]
    (stored, measured) = next(workloads.references(corpus, random.Random(0)))
    for draft in measured:
        named = re.search(r"about (Land\d+)\?", draft.turns[0]).group(1)
        order = re.findall(r"(?:^|\n\n)(Land\d+)\. ", draft.turns[0])
        above = order[order.index(named) - 1]
        assert draft.answers == (next(item.capital for item in corpus if item.name == above),)
    assert workloads.encoded(tokenizer, stored)[1] == ()


def test_cases_refuse_an_unknown_workload():
    with pytest.raises(ValueError, match="`workload` must be one of"):
        workloads.cases("poems", Words(True), 1)


def test_new_order_moves_everything_where_it_can():
    rng = random.Random(0)
    for count in (4, 5, 9):
        order = workloads.new_order(count, rng)
        assert sorted(order) == list(range(count))
        assert all(place != index for place, index in enumerate(order))
        assert all(right != left + 1 for left, right in zip(order, order[1:], strict=False))
    assert workloads.new_order(2, rng) == [1, 0]
    assert workloads.new_order(3, rng) != [0, 1, 2]
    with pytest.raises(ValueError, match="no other order"):
        workloads.new_order(1, rng)


# -- scores --------------------------------------------------------------------------------------------------------


def test_scores_normalise_as_squad_does():
    assert scores.normalised("  The Cat's, a  HAT! ") == "cats hat"
    assert scores.f1("It was the Denver Broncos.", ["Denver Broncos", "Broncos"]) == pytest.approx(2 / 3)
    assert scores.f1("Broncos", ["Denver Broncos", "the Broncos"]) == 1.0
    assert scores.f1("Panthers", ["Denver Broncos"]) == 0.0
    assert scores.f1("the", ["a"]) == 1.0 and scores.f1("", ["x"]) == 0.0
    assert scores.exact_match("The  Broncos!", ["broncos"]) == 1.0


def test_contained_counts_whole_words_in_a_row():
    assert scores.contained("They say it is the Denver Broncos, indeed", ["denver broncos"]) == 1.0
    assert scores.contained("Denver and its Broncos", ["Denver Broncos"]) == 0.0
    assert scores.contained("artist", ["art"]) == 0.0


def test_grouped_bootstrap_is_wider_where_a_group_repeats_itself():
    rng = np.random.default_rng(0)
    values = rng.normal(size=20)
    repeated, groups = np.repeat(values, 10), np.repeat([str(number) for number in range(20)], 10)
    low, high = scores.grouped_bootstrap([repeated], groups, lambda mean: mean)
    naive = scores.grouped_bootstrap([repeated], [str(number) for number in range(200)], lambda mean: mean)
    assert low < values.mean() < high
    assert high - low > 2 * (naive[1] - naive[0])


def test_grouped_bootstrap_keeps_pairs_together():
    values = np.random.default_rng(0).exponential(size=50)
    groups = [str(number) for number in range(50)]
    low, high = scores.grouped_bootstrap([values, values * 4], groups, lambda first, second: first / second)
    assert low == pytest.approx(0.25) and high == pytest.approx(0.25)


def test_spearman_ranks_ties_and_refuses_constants():
    assert scores.spearman([1, 2, 3, 4], [10, 20, 30, 99]) == pytest.approx(1.0)
    assert scores.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert scores.spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert np.isnan(scores.spearman([1, 1, 1], [1, 2, 3]))


# -- rows of a walk ------------------------------------------------------------------------------------------------

NEW, SHIFTED, RIGHT, PROMPT = 60, 400, 30, 500  # new rows, moved rows, new rows right of the first repaired one


def a_prompt(kls=(0.2, 0.05, 0.01, 0.004), name: str = "passages") -> Traced:
    """What the engine counts: a pass over the new rows, then all rows of each level and the new ones right of them."""
    trace, rows = [], NEW
    for (level, wanted), kl in zip(LEVELS, (*kls, 0.0), strict=True):
        share = max(wanted, 0.02)  # seam rows
        rows += share * SHIFTED + RIGHT
        features = {"share": share, "shifted": (1 - share) * SHIFTED / PROMPT}
        trace.append(LevelTrace(level, features, kl, rows))
    return Traced(name, 0, PROMPT, trace)


def test_walk_rows_of_all_levels_are_those_counted():
    item = a_prompt()
    assert walk_rows(item, ("seams",)) == item.trace[0].rows
    assert walk_rows(item, ("seams", "10 %", "30 %")) == pytest.approx(item.trace[2].rows)
    assert walk_rows(item, ("seams", "10 %", "30 %", "60 %", "full")) == pytest.approx(item.trace[4].rows)


def test_walk_rows_of_a_jump_run_the_new_rows_once():
    item = a_prompt()
    assert walk_rows(item, ("seams", "60 %")) == pytest.approx(NEW + 0.62 * SHIFTED + 2 * RIGHT)
    assert walk_rows(item, ("seams", "full")) == pytest.approx(NEW + 0.02 * SHIFTED + RIGHT + SHIFTED + RIGHT)


def test_direct_rows_have_one_pass_of_repair():
    item = a_prompt()
    assert direct_rows(item, "30 %") == pytest.approx(NEW + 0.3 * SHIFTED + RIGHT)
    assert direct_rows(item, "full") == pytest.approx(SHIFTED + NEW)


def test_rows_of_a_level_that_repairs_no_more_than_the_one_before_it():
    item = a_prompt()
    same = item.trace[0]
    item.trace[1] = LevelTrace("10 %", same.features, same.kl, same.rows)
    assert direct_rows(item, "10 %") == pytest.approx(direct_rows(item, "seams"))
    assert walk_rows(item, ("seams", "10 %")) == pytest.approx(NEW + 2 * (0.02 * SHIFTED + RIGHT))


def test_cheapest_level_covers_as_many():
    easy, hard = a_prompt((0.01, 0.01, 0.01, 0.01)), a_prompt((0.9, 0.9, 0.01, 0.01))
    assert cheapest([easy] * 19 + [hard], 0.05, 0.95)[0] == "seams"  # 0.9 is what alpha asks for
    assert cheapest([easy, hard], 0.05, 1.0)[0] == "30 %"
    assert cheapest([easy, hard], 0.05, 0.5)[0] == "seams"
    assert cheapest([hard], 0.001, 1.0)[0] == "full"


def test_folds_hold_each_prompt_out_once():
    found = [a_prompt(name=name) for name in ("chat", "tools") for _ in range(11)]
    held = [item for _, part in folds(found, 0) for item in part]
    assert sorted(map(id, held)) == sorted(map(id, found))
    for rest, part in folds(found, 0):
        assert not set(map(id, rest)) & set(map(id, part))
        assert {item.workload for item in part} == {"chat", "tools"}
