"""
Every causal model type of transformers, tiny and random: what is measured of it, and that no answer is silently
wrong. `types.csv` is the oracle of the measurement. Answers are compared with transformers' own; O1 to O3 are those of
`test_oracles.py`. A few types are odd in transformers itself: `types.csv` says how, the sets below what follows.
"""

import functools
import inspect

import pytest
import torch
import transformers
from transformers import DynamicCache

from hf_suffix_cache import SuffixCache
from reference import Answer, ask, cache_name, check_pool, check_report, moved_pieces, served, view_of
from tiny_models import fingerprint, new_text, old_text

from .builder import build, model_types
from .table import KINDS, expected, measured_family

pytestmark = pytest.mark.slow

TYPES = expected()
INSTALLED = [name for name in TYPES if name in model_types()]
SHIFT = [name for name in INSTALLED if TYPES[name].kind == "shift"]
STOCK_RAISES = {"gemma4_assistant", "gemma4_unified_assistant"}  # drafts need their target's rows
STOCK_FORGETS = {"musicgen"}  # stock generate runs the last token of the prompt only
OWN_GENERATE = {"musicgen", "musicgen_melody"}  # not transformers' generate, so that no call is served
# Batches are not served: attention that takes no rows that lie apart, and pads that move once the cache is filled.
ALONE = {"gpt_neox_japanese", "git"}
SERVED = [name for name in INSTALLED if name not in OWN_GENERATE]
REUSING = [name for name in SERVED if TYPES[name].kind != "none"]
NOT_SHIFT = [name for name in SERVED if TYPES[name].kind != "shift"]

# Largest difference of logits, relative to the largest one. Two stock runs with other chunks of the prompt differ by
# up to 2e-5, rows of another text by 1e-2 and more.
TOLERANCE = 1e-4
CONTEXT = 1e-2  # absolute: what a changed first half of a prompt must do to the last logits
UNREPAIRED = {"repair_fraction": 0.0, "seam_tokens": 0, "tail_tokens": 8}

BASE = old_text(60, 1)
FIRST = BASE + new_text(12, 2)
LONGER = FIRST + new_text(20, 3)
DIVERGING = BASE[:45] + new_text(20, 4)
HEAD, END = new_text(12, 5), new_text(9, 6)
MOVED = HEAD + BASE + END
_MIXED = ["sliding_attention", "full_attention"] * 2
VARIANTS = {  # what a configuration can change of a type: the changes, and the kind
    "falcon with alibi": ("falcon", {"alibi": True}, "shift"),
    "falcon, new decoder": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "shift"),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True}, "shift"),
    "gemma4, keys are values": ("gemma4_text", {"attention_k_eq_v": True, "num_kv_shared_layers": 0}, "shift"),
    "gemma4_unified, shared": (
        "gemma4_unified_text",
        {"num_kv_shared_layers": 2, "layer_types": _MIXED},
        "shift",
    ),
    "deepseek_v3, half-split": ("deepseek_v3", {"rope_interleave": False}, "shift"),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}, "shift"),
    "lfm2, attention only": ("lfm2", {"layer_types": ["full_attention"] * 4}, "shift"),
    "minimax_m3, dense": ("minimax_m3_vl_text", {"layer_types": None}, "shift"),
    "roformer, turned values": ("roformer", {"rotary_value": True}, "prefix"),
    "llama4, queries scaled from the start": (
        "llama4_text",
        {"no_rope_layers": [1, 0, 1, 0], "attn_temperature_tuning": True, "floor_scale": 16},
        "prefix",
    ),
    "dory, last loop's rows": ("dory", {"recurrent_kv_cache_mode": "last_loop"}, "none"),
    "gemma, bidirectional": ("gemma", {"use_bidirectional_attention": True}, "none"),
    "gemma3, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "none"),
    "bert, an encoder": ("bert", {"is_decoder": False}, "none"),
    "cpmant without a prompt": ("cpmant", {"prompt_length": 0}, "none"),
    "moshi, a window that is never reached": ("moshi", {"sliding_window": 512}, "none"),
}
NEAR = HEAD + BASE[:35] + END  # short: windows of 16 tokens in 4 layers still see the rows that a new head changes
REQUESTS = {"first": FIRST, "repeat": FIRST, "longer": LONGER, "diverging": DIVERGING, "moved": MOVED}


# -- helpers --------------------------------------------------------------------------------------------------------


@functools.cache
def capability(model_type):
    return SuffixCache().capability(build(model_type))


def answers(model, ids, cache, **options):
    """`(got, want)`: a request with the cache and without. Where transformers alone raises, both must, and equally."""
    if model.generation_config.pad_token_id is None:
        options.setdefault("pad_token_id", 0)
    try:
        want = ask(model, ids, **options)
    except Exception as error:
        with pytest.raises(type(error)):
            ask(model, ids, cache, **options)
        return None, None
    return ask(model, ids, cache, **options), want


def difference(got: Answer, want: Answer, steps: int | None = None) -> float:
    """Largest difference of logits over the first `steps`, relative to the largest logit that is not forbidden."""
    pairs = list(zip(got.scores, want.scores, strict=True))[:steps]
    scale = max(b[b.isfinite()].abs().max().item() for _, b in pairs)
    return max((a - b).masked_fill(a == b, 0.0).abs().max().item() for a, b in pairs) / scale


def same(got: Answer, want: Answer) -> None:
    assert difference(got, want) < TOLERANCE
    assert got.ids.tolist() == want.ids.tolist()
    if got.report is not None:
        check_report(got.report)


def left_padded(*texts) -> tuple[list, torch.Tensor]:
    """Ids of a batch and its mask."""
    width = max(map(len, texts))
    pads = [width - len(ids) for ids in texts]
    ids = [[0] * pad + row for pad, row in zip(pads, texts, strict=True)]
    return ids, torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])


def places(model, start: int, stop: int) -> dict:
    """Mask and, where the forward takes them, positions of the tokens `[start, stop)` of one prompt."""
    arguments = {"attention_mask": torch.ones(1, stop, dtype=torch.long)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = torch.arange(start, stop)[None]
    return arguments


def first_layer(model, ids, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[heads, tokens, dim]` of cache layer 0, from a full prefill by transformers alone."""
    cache = DynamicCache()  # made without the configuration it keeps the rows outside of a window too
    arguments = places(model, 0, len(ids))
    if "position_ids" in arguments:
        arguments["position_ids"] += offset
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=True, **arguments, **{cache_name(model): cache})
    return cache.layers[0].keys[0], cache.layers[0].values[0]


def unequal(got, want) -> float:
    """Largest difference of two tensors, relative to the largest wanted value."""
    return ((got - want).abs().max() / want.abs().max()).item()


# -- the table and the models ---------------------------------------------------------------------------------------


def test_table_is_complete():
    missing = set(model_types()) - set(TYPES)
    assert not missing, f"transformers {transformers.__version__} has model types that types.csv lacks: {missing}"
    assert {row.kind for row in TYPES.values()} == set(KINDS)
    assert all((row.kind == "shift") == (row.reason == "") for row in TYPES.values())
    if transformers.__version__.startswith("5.24."):
        assert len(INSTALLED) == len(TYPES) == 196


@pytest.mark.parametrize("model_type", INSTALLED)
def test_control_changed_first_half_moves_last_logits(model_type):
    if model_type in STOCK_RAISES:
        with pytest.raises(ValueError):
            ask(build(model_type), FIRST)
        return
    model = build(model_type)
    assert sum(parameter.numel() for parameter in model.parameters()) < 50e6
    want, other = (ask(model, ids, steps=1).first for ids in (FIRST[:40], new_text(20, 7) + FIRST[20:40]))
    assert want.isfinite().any() and not want.isnan().any()
    moved = (want - other).abs().nan_to_num(0.0).max().item()
    assert moved == 0.0 if model_type in STOCK_FORGETS else moved > CONTEXT


# -- measurement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", INSTALLED)
def test_measured_kind_is_that_of_the_table(model_type):
    row, measured = TYPES[model_type], capability(model_type)
    assert measured.kind == row.kind, measured.reason
    if row.kind == "shift":
        assert measured.reason is None
        assert measured_family(measured) == row.family
    else:
        assert row.reason in measured.reason
    assert measured.rows < 200 and measured.seconds < 5


def test_enough_types_shift_and_reuse_prefixes():
    kinds = [capability(model_type).kind for model_type in INSTALLED]
    assert kinds.count("shift") >= 100
    assert kinds.count("shift") + kinds.count("prefix") >= 120


# -- O1 exact -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", SERVED)
def test_o1_exact_answers_are_those_of_transformers(model_type):
    model, row = build(model_type), TYPES[model_type]
    answers(model, FIRST, SuffixCache())  # big_bird writes into its configuration when it meets its first short text
    before = fingerprint(model)
    cache = SuffixCache(fidelity="exact")
    for turn in range(3):
        for name, ids in REQUESTS.items():
            got, want = answers(model, ids, cache)
            if want is None:
                assert model_type in STOCK_RAISES
                continue
            same(got, want)
            assert served(got.report) == got.report.carried_tokens == 0
            if row.kind == "none":
                assert got.report.exact_tokens == 0 and row.reason in got.report.reason
            elif turn or name == "repeat":
                assert got.report.exact_tokens == len(ids) - 1, got.report.reason
            elif name == "longer":
                assert got.report.exact_tokens >= len(FIRST)
            elif name == "diverging":
                assert got.report.exact_tokens == 45
    if row.kind == "none":
        assert cache.stats.bytes_used == cache.stats.segments == 0
    check_pool(cache)
    assert fingerprint(model) == before


@pytest.mark.parametrize("model_type", REUSING)
def test_o1_control_rows_of_another_text_are_noticed(model_type):
    model = build(model_type)
    other = new_text(40, 8) + FIRST[40:]
    logits = []
    for ids in (FIRST, other):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([ids[:50]]), use_cache=True, **{cache_name(model): cache}, **places(model, 0, 50))
            output = model(torch.tensor([FIRST[50:]]), **{cache_name(model): cache}, **places(model, 50, len(FIRST)))
            logits.append(output.logits[:, -1])
    want = ask(model, FIRST, steps=1, pad_token_id=0).scores
    right, wrong = (difference(Answer(None, [scores], []), Answer(None, want, [])) for scores in logits)
    assert right < TOLERANCE < CONTEXT < wrong


@pytest.mark.parametrize("model_type", SERVED)
def test_o1_left_padded_batches_are_those_of_transformers(model_type):
    model = build(model_type)
    cache = SuffixCache(fidelity="exact")
    ids, mask = left_padded(DIVERGING, FIRST)
    answers(model, FIRST, cache)
    for _ in range(3):
        got, want = answers(model, ids, cache, attention_mask=mask)
        if want is not None:
            same(got, want)
    if TYPES[model_type].kind != "none":
        served_in_batches = capability(model_type).batches and "no position_ids" not in TYPES[model_type].family
        assert capability(model_type).batches == (model_type not in ALONE)
        assert got.report.exact_tokens == (len(DIVERGING) + len(FIRST) - 2 if served_in_batches else 0)
        assert (got.report.reason is None) == served_in_batches
    answers(model, DIVERGING, cache)  # rows that a batch has stored must be right for a prompt without pads
    got, want = answers(model, DIVERGING, cache)
    if want is not None:
        same(got, want)


@pytest.mark.parametrize("model_type", NOT_SHIFT)
def test_default_fidelity_approximates_nothing_where_rows_cannot_be_moved(model_type):
    model = build(model_type)
    cache = SuffixCache()
    for ids in (FIRST, MOVED, MOVED, BASE[20:] + END, LONGER):
        got, want = answers(model, ids, cache)
        if want is not None:
            same(got, want)
            assert served(got.report) == got.report.carried_tokens == 0


@pytest.mark.parametrize("model_type", sorted(OWN_GENERATE & set(INSTALLED)))
def test_generate_of_a_models_own_is_never_silently_wrong(model_type):
    model, cache = build(model_type), SuffixCache()
    for ids in (FIRST, LONGER, FIRST, MOVED):
        want = ask(model, ids)
        try:
            got = ask(model, ids, cache)
        except ValueError:  # names the way out
            continue
        same(got, want)
    assert cache.stats.segments == 0


@pytest.mark.parametrize("model_type", ["bert", "ernie", "gemma3", "gpt2", "hrm_text", "rembert"])
def test_token_types_are_never_answered_from_rows_of_others(model_type):
    # segments of bert and its kin, embeddings of gpt2, and what gemma3 and hrm_text read in both directions
    model = build(model_type)
    marks = [{}, *({"token_type_ids": torch.full((1, len(FIRST)), value)} for value in (0, 1))]
    wanted = [ask(model, FIRST, pad_token_id=0, **options) for options in marks]
    assert difference(wanted[2], wanted[0]) > CONTEXT  # control: they matter
    for stored in marks:
        cache = SuffixCache(fidelity="exact")
        ask(model, FIRST, cache, pad_token_id=0, **stored)
        for options, want in zip(marks * 2, wanted * 2, strict=True):
            same(ask(model, FIRST, cache, pad_token_id=0, **options), want)
        assert ask(model, FIRST, cache, pad_token_id=0).report.exact_tokens == len(FIRST) - 1


@pytest.mark.parametrize("variant", [name for name, row in VARIANTS.items() if row[0] in INSTALLED])
def test_variants_of_a_configuration_are_measured_anew_and_never_silently_wrong(variant):
    model_type, changes, kind = VARIANTS[variant]
    model = build(model_type, **changes)
    cache = SuffixCache(fidelity="exact")
    measured = cache.capability(model)
    assert measured.kind == kind, measured.reason
    for _ in range(2):
        for ids in REQUESTS.values():
            same(*answers(model, ids, cache))
    if kind == "shift":
        cache = SuffixCache(**{**UNREPAIRED, "repair_fraction": 1.0})
        ask(model, FIRST, cache, pad_token_id=0)
        got, want = answers(model, NEAR, cache)
        same(got, want)
        assert got.report.repaired_tokens == 35


# -- O2 layer 0 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", SHIFT)
def test_o2_first_layer_rows_are_fresh_after_a_shift(model_type):
    model = build(model_type)
    pieces = BASE[:40]
    stored = new_text(20, 11) + pieces + new_text(36, 12)
    turns = capability(model_type).layers[0].rotary or capability(model_type).layers[0].value_rotary
    for number, shift in enumerate((7, 64, -5)):
        cache = SuffixCache()
        ask(model, stored, cache, pad_token_id=0)
        ids = new_text(20 + shift, 20 + number) + pieces + new_text(36, 30 + number)
        answer = ask(model, ids, cache, pad_token_id=0, return_dict_in_generate=True)
        assert [piece[2] for piece in moved_pieces(answer.report)] == [shift]
        assert answer.report.shifted_tokens > 0
        layer = view_of(answer.output).layers[0]
        got = [states[0, :, : len(ids)] for states in (layer.keys, layer.values)]
        want, misplaced = first_layer(model, ids), first_layer(model, ids, offset=7)
        assert max(map(unequal, got, want)) < 1e-5
        assert max(map(unequal, got, misplaced)) > 1e-2 or turns is None  # control: a wrong rotation is noticed


# -- O3 ratio 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", SHIFT)
def test_o3_with_every_shifted_row_repaired_the_answer_is_exact(model_type):
    model = build(model_type)
    for _ in range(3):
        cache = SuffixCache(**{**UNREPAIRED, "repair_fraction": 1.0})
        ask(model, FIRST, cache, pad_token_id=0)
        got, want = answers(model, NEAR, cache)
        same(got, want)
        assert got.report.repaired_tokens == 35 and got.report.shifted_tokens == 0


@pytest.mark.parametrize("model_type", SHIFT)
def test_o3_holds_in_left_padded_batches_and_eager_attention(model_type):
    repaired = {**UNREPAIRED, "repair_fraction": 1.0}
    other = new_text(5, 9) + BASE[:30] + END
    ids, mask = left_padded(NEAR, other)
    model, cache = build(model_type), SuffixCache(**repaired)
    ask(model, FIRST, cache, pad_token_id=0)
    got, want = answers(model, ids, cache, attention_mask=mask)
    same(got, want)
    assert got.report.repaired_tokens == (0 if model_type in ALONE else 35 + 30), got.report.reason
    model, cache = build(model_type, attention="eager"), SuffixCache(**repaired)
    ask(model, FIRST, cache, pad_token_id=0)
    got, want = answers(model, NEAR, cache)
    same(got, want)
    assert got.report.repaired_tokens == 35


@pytest.mark.parametrize("model_type", SHIFT)
def test_o3_control_without_repair_the_answer_is_not_exact(model_type):
    model = build(model_type)
    cache = SuffixCache(**UNREPAIRED)
    ask(model, FIRST, cache, pad_token_id=0)
    got, want = answers(model, NEAR, cache)
    assert got.report.shifted_tokens == 35
    assert difference(got, want, steps=1) > 10 * TOLERANCE
