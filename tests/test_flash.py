"""
Attention by flash-attn: decoding and scattered passes, against attention written out under an explicit mask.

The library is a stand-in on the CPU here (`flash_shim.py`); what needs the real one is in `test_gpu.py`.
"""

import sys
import types

import numpy as np
import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flash_shim
from hf_suffix_cache import flash
from hf_suffix_cache.attention import attention_configs
from hf_suffix_cache.flash import Library, flash_available, flash_decode, flash_scattered
from hf_suffix_cache.masks import causal_by_position
from hf_suffix_cache.repair import Deviation
from reference import ask, max_difference, same_answer, stored
from tiny_models import A, B, C, head, make_model, question

HEADS, KV_HEADS, DIM = 4, 2, 16
SHIM = Library(
    flash_shim.flash_attn_varlen_func,
    flash_shim.flash_attn_with_kvcache,
    device="cpu",
    dtypes=(torch.float32, torch.bfloat16),
)
RUNS = {
    "one run": [(0, 40)],
    "last run alone": [(30, 40)],
    "single rows": [(3, 4), (7, 8), (9, 10), (39, 40)],
    "mixed": [(2, 3), (5, 11), (12, 13), (20, 33), (39, 40)],
}


@pytest.fixture
def shim(monkeypatch):
    """The stand-in serves as the library; `shim(...)` changes it."""

    def use(**changes):
        monkeypatch.setattr(flash, "library", lambda: Library(**{**vars(SHIM), **changes}))

    use()
    return use


def columns_of(runs) -> np.ndarray:
    return np.concatenate([np.arange(start, stop) for start, stop in runs])


def extent(batch: int, total: int, start: int = 10, behind: int = 300, spare: int = 6, dtype=torch.float32):
    """
    Keys and values `[batch, kv_heads, total, dim]` as a view lays them over a slab: NaN in every other row, and no
    more than `behind` rows from the last batch row's end to the slab's.
    """
    rows = total + spare
    views = []
    for _ in range(2):
        slab = torch.full((2, KV_HEADS, start + batch * rows + behind, DIM), float("nan"), dtype=dtype)
        window = slab[1][:, start : start + batch * rows]  # the last layer: nothing lies behind its last head
        views.append(window.unflatten(1, (batch, rows)).transpose(0, 1)[:, :, :total])
        views[-1].normal_()
    return views


def queries(batch: int, count: int, dtype=torch.float32) -> torch.Tensor:
    """As models make them: heads in front of rows by a transposed view."""
    return torch.randn(batch, count, HEADS, DIM, dtype=dtype).transpose(1, 2)


def written_out(query, key, value, columns, scaling=None, window=None, softcap=None, pads=None) -> torch.Tensor:
    """`[batch, queries, heads, dim]` in fp64; NaN for queries that see nothing."""
    total, scaling = key.shape[2], DIM**-0.5 if scaling is None else scaling
    valid = None if pads is None else torch.arange(total) >= torch.from_numpy(pads)[:, None]
    mask = causal_by_position(torch.from_numpy(columns), torch.arange(total), window, valid)
    key, value = (part.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal, and zero where nothing is seen."""
    assert got is not None and got.shape == want.shape
    assert not got.isnan().any()
    nothing = want.isnan()
    assert (got.double() - want).masked_fill(nothing, 0.0).abs().max() < tolerance
    assert (got[nothing] == 0).all()


# -- the stand-in -----------------------------------------------------------------------------------------------------


def test_stand_in_is_aligned_as_the_library_documents():
    documented = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    assert flash_shim.visible(2, 5, causal=True).int().tolist() == documented.tolist()
    documented = [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]
    assert flash_shim.visible(5, 2, causal=True).int().tolist() == documented
    local = flash_shim.visible(3, 6, causal=True, window_size=(1, 0))
    assert local.int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1]]


def test_stand_in_refuses_what_the_library_refuses(shim):
    query = torch.randn(2, HEADS, DIM)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    pages = torch.randn(1, 128, KV_HEADS, DIM)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(AssertionError, match="multiple of 256"):
        flash_shim.flash_attn_varlen_func(query, pages, pages, ends, ends, 2, 2, causal=True, block_table=table)
    keys = torch.randn(1, 8, KV_HEADS, DIM)
    with pytest.raises(AssertionError, match="lengths beside them"):
        flash_shim.flash_attn_with_kvcache(query[None], keys, keys, cache_leftpad=torch.zeros(1, dtype=torch.int32))


# -- decoding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("pads", [None, [0, 3, 9]])
def test_decode_equals_attention_written_out(shim, pads, count, window, softcap):
    pads = None if pads is None else np.array(pads)
    batch, total = 1 if pads is None else len(pads), 40
    key, value = extent(batch, total)
    query, columns = queries(batch, count), np.arange(total - count, total)
    for scaling in (None, 0.4):
        got = flash_decode(query, key, value, scaling, window, softcap, pads)
        same(got, written_out(query, key, value, columns, scaling, window, softcap, pads))


def test_decode_of_a_windowed_slice_counts_pads_from_its_first_column(shim):
    pads, window = np.array([0, 4, 13]), 8
    for total in (12, 14, 17, 21, 30):  # the pads leave the window one after the other
        key, value = extent(3, total)
        query = queries(3, 1)
        first = max(0, total - window)
        got = flash_decode(query, key[:, :, first:], value[:, :, first:], None, window, None, pads, total)
        same(got, written_out(query, key, value, np.array([total - 1]), window=window, pads=pads))


def test_decode_goes_on_with_the_same_pads(shim):
    """What is kept from step to step must not hold lengths of earlier steps."""
    pads = np.array([2, 5])
    key, value = extent(2, 60)
    for total in range(20, 60):
        query = queries(2, 1)
        got = flash_decode(query, key[:, :, :total], value[:, :, :total], pads=pads)
        want = written_out(query, key[:, :, :total], value[:, :, :total], np.array([total - 1]), pads=pads)
        same(got, want)
    assert len(flash._kept.lengths[1]) <= flash.MOST_KEPT


# -- scattered passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("pads", [None, [0, 6, 31]])
@pytest.mark.parametrize("runs", RUNS)
def test_scattered_rows_equal_attention_written_out(shim, runs, pads, window, softcap):
    columns = columns_of(RUNS[runs])
    pads = None if pads is None else np.array(pads)
    batch = 1 if pads is None else len(pads)
    key, value = extent(batch, 45)
    query = queries(batch, len(columns))
    for scaling in (None, 0.4):
        got = flash_scattered(query, key, value, columns, scaling, window, softcap, pads)
        same(got, written_out(query, key, value, columns, scaling, window, softcap, pads))


def test_scattered_rows_over_many_pages(shim):
    columns = columns_of([(0, 3), (250, 262), (511, 513), (700, 701), (1020, 1030)])
    pads = np.array([0, 255, 256, 700])
    key, value = extent(4, 1030)
    query = queries(4, len(columns))
    same(flash_scattered(query, key, value, columns, pads=pads), written_out(query, key, value, columns, pads=pads))


def test_scattered_rows_in_half_precision(shim):
    columns = columns_of(RUNS["mixed"])
    key, value = extent(2, 45, dtype=torch.bfloat16)
    query = queries(2, len(columns), torch.bfloat16)
    same(flash_scattered(query, key, value, columns), written_out(query, key, value, columns), 2e-2)


def test_keys_need_not_be_a_view_of_a_slab(shim):
    columns = columns_of(RUNS["mixed"])
    rows = 45 + 256
    for layout in ((2, KV_HEADS, rows, DIM), (2, rows, KV_HEADS, DIM)):
        key, value = (torch.randn(layout) for _ in range(2))
        if layout[1] == rows:
            key, value = key.transpose(1, 2), value.transpose(1, 2)
        key, value = key[:, :, :45], value[:, :, :45]
        query = queries(2, len(columns))
        same(flash_scattered(query, key, value, columns), written_out(query, key, value, columns))


def upper_left(queries: int, keys: int, causal: bool, window_size=(-1, -1)) -> torch.Tensor:
    """The other convention: query i stands at key i."""
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def test_control_another_alignment_is_wrong(shim, monkeypatch):
    columns = columns_of(RUNS["mixed"])
    key, value = extent(1, 45)
    query = queries(1, len(columns))
    want = written_out(query, key, value, columns)
    same(flash_scattered(query, key, value, columns), want)
    monkeypatch.setattr(flash_shim, "visible", upper_left)
    assert (flash_scattered(query, key, value, columns) - want).abs().max() > 0.1
    newest = slice(-3, None)
    assert (flash_decode(query[:, :, newest], key[:, :, :40], value[:, :, :40]) - want[:, newest]).abs().max() > 0.1


def test_control_a_run_that_sees_one_key_less_is_wrong(shim):
    columns = columns_of(RUNS["mixed"])
    key, value = extent(1, 45)
    query = queries(1, len(columns))

    def short(q, k, v, *args, cu_seqlens_k, max_seqlen_k, **kwargs):
        ends = torch.cat([cu_seqlens_k[:1], (cu_seqlens_k.diff() - 1).cumsum(0)]).int()
        return SHIM.varlen(q, k, v, *args, cu_seqlens_k=ends, max_seqlen_k=max_seqlen_k - 1, **kwargs)

    shim(varlen=short)
    got = flash_scattered(query, key, value, columns)
    assert (got - written_out(query, key, value, columns)).abs().max() > 0.1


def test_keys_are_read_where_they_lie(shim):
    """No copy of keys or values, and pages only where the library shares keys between sequences."""
    seen = []

    def spy(function):
        def call(q, k, v, *args, **kwargs):
            seen.extend((k, v))
            return function(q, k, v, *args, **kwargs)

        return call

    shim(varlen=spy(SHIM.varlen), with_kvcache=spy(SHIM.with_kvcache))
    columns = columns_of(RUNS["mixed"])
    key, value = extent(2, 45)
    flash_scattered(queries(2, len(columns)), key, value, columns)
    flash_decode(queries(2, 1), key, value)
    assert len(seen) == 4
    for tensor, own in zip(seen, (key, value, key, value), strict=True):
        assert tensor.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        assert tensor.data_ptr() == own.data_ptr()


def test_many_sequences_go_in_several_launches(shim, monkeypatch):
    columns, launches = np.arange(0, 45, 3), []

    def counted(q, *args, **kwargs):
        launches.append(len(kwargs["cu_seqlens_q"]) - 1)
        return SHIM.varlen(q, *args, **kwargs)

    shim(varlen=counted)
    key, value = extent(2, 45)
    query, pads = queries(2, len(columns)), np.array([0, 8])
    want = written_out(query, key, value, columns, pads=pads)
    monkeypatch.setattr(flash, "GRID_LIMIT", HEADS * 7)
    same(flash_scattered(query, key, value, columns, pads=pads), want)
    assert launches == [7, 7, 7, 7, 2]
    launches.clear()
    monkeypatch.setattr(flash, "GRID_LIMIT", 65_535)
    monkeypatch.setattr(flash, "INT32_MAX", 43 * 10)
    same(flash_scattered(query, key, value, columns.copy(), pads=pads), want)
    assert launches == [10, 10, 10]


def test_plan_is_made_once_per_forward_and_never_for_other_columns(shim, monkeypatch):
    made = []
    make = flash._make_plan
    monkeypatch.setattr(flash, "_make_plan", lambda *args: made.append(1) or make(*args))
    key, value = extent(1, 45)
    columns = columns_of(RUNS["mixed"])
    for _ in range(3):  # its layers
        query = queries(1, len(columns))
        same(flash_scattered(query, key, value, columns), written_out(query, key, value, columns))
    assert len(made) == 1
    other = columns + 2
    query = queries(1, len(other))
    same(flash_scattered(query, key, value, other), written_out(query, key, value, other))
    wide, values = extent(2, 45)
    query = queries(2, len(other))
    same(flash_scattered(query, wide, values, other), written_out(query, wide, values, other))
    assert len(made) == 3


def test_columns_that_fit_neither_queries_nor_keys_are_an_error(shim):
    key, value = extent(1, 45)
    for columns in (np.arange(3), np.array([2, 45])):
        with pytest.raises(ValueError, match="one of 45 keys for each of 2 queries"):
            flash_scattered(queries(1, 2), key, value, columns)


# -- what it leaves to others -----------------------------------------------------------------------------------------


def test_last_page_must_lie_in_memory(shim):
    columns = np.array([3, 4, 44])
    for behind, fits in ((256 - 45 - 6, True), (256 - 45 - 7, False)):
        key, value = extent(1, 45, behind=behind, spare=6)
        query = queries(1, 3)
        got = flash_scattered(query, key, value, columns)
        if fits:
            same(got, written_out(query, key, value, columns))
        else:
            assert got is None
        same(flash_decode(query, key, value), written_out(query, key, value, np.arange(42, 45)))  # needs no pages


def test_what_the_library_would_copy_or_refuse_is_left_to_others(shim):
    columns = np.array([3, 4])
    key, value = extent(1, 45)
    query = queries(1, 2)

    def refused(*tensors):
        return flash_decode(*tensors) is None and flash_scattered(*tensors, columns) is None

    assert not refused(query, key, value)
    assert refused(query.double(), key.double(), value.double())
    assert refused(query, key, value.bfloat16())
    assert refused(query[..., :12], key[..., :12], value[..., :12])  # not a multiple of 8
    assert refused(query, key, value[..., :8])
    assert refused(query[:, :3], key, value)  # heads that can't be grouped
    wide = [part.repeat(1, 1, 1, 17) for part in (query, key, value)]
    assert refused(*wide)  # 272 dimensions
    assert refused(query.clone().requires_grad_(), key, value)
    with torch.no_grad():
        assert not refused(query.clone().requires_grad_(), key, value)
    strided = key.transpose(2, 3).contiguous().transpose(2, 3)
    assert refused(query, strided, value)


def test_without_the_library_nothing_is_done(monkeypatch):
    monkeypatch.setattr(flash, "library", lambda: None)
    key, value = extent(1, 45)
    assert not flash_available("cpu") and not flash_available("cuda") and not flash_available()
    assert flash_decode(queries(1, 1), key, value) is None
    assert flash_scattered(queries(1, 1), key, value, np.array([4])) is None


def test_library_of_a_gpu_is_not_for_tensors_elsewhere(shim):
    shim(device="cuda")
    assert not flash_available("cpu")
    key, value = extent(1, 45)
    assert flash_decode(queries(1, 1), key, value) is None


@pytest.fixture
def installed(monkeypatch):
    """`installed(**functions)`: a module of the library's name that has these; `None`: it isn't there."""

    def install(functions):
        module = None
        if functions is not None:
            module = types.ModuleType("flash_attn")
            vars(module).update(functions)
        monkeypatch.setitem(sys.modules, "flash_attn", module)
        flash.library.cache_clear()

    yield install
    flash.library.cache_clear()


def test_library_is_found_if_it_knows_what_is_needed(installed, caplog):
    def old(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
        raise AssertionError("never called")

    names = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    installed({name: getattr(flash_shim, name) for name in names})
    found = flash.library()
    assert found.varlen is flash_shim.flash_attn_varlen_func and found.device == "cuda"
    assert torch.float32 not in found.dtypes
    installed(None)
    assert flash.library() is None and not caplog.records
    installed({"flash_attn_varlen_func": old, "flash_attn_with_kvcache": flash_shim.flash_attn_with_kvcache})
    assert flash.library() is None
    assert "2.6 or newer" in caplog.text and "block_table" in caplog.text


# -- whole requests of a model that is set to flash-attn --------------------------------------------------------------


class Stock:
    """
    Transformers' own flash attention, as far as it goes: it knows no other place for queries than the end of the keys,
    and would take scattered positions for packed sequences. With left pads it copies all keys.
    """

    def __init__(self):
        self.calls = []

    def __call__(self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
        positions = kwargs.get("position_ids")
        if query.shape[2] > 1 and positions is not None:
            assert (positions.diff() <= 1).all(), "scattered positions"
        self.calls.append(query.shape[2])
        pads = None
        if attention_mask is not None:
            assert attention_mask.dim() == 2, "flash attention takes no 4-D mask"
            pads = key.shape[2] - attention_mask.sum(-1).int()
        return SHIM.with_kvcache(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            cache_seqlens=key.shape[2],
            cache_leftpad=pads,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        ), None


@pytest.fixture
def on_flash(shim, monkeypatch):
    """`on_flash(model)`: the model as if it had been loaded with flash_attention_2; gives what stands in for stock."""
    stock, switched = Stock(), []
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", stock)

    def use(model):
        for config in attention_configs(model):
            switched.append((config, config._attn_implementation_internal))
            config._attn_implementation_internal = "flash_attention_2"
        return stock

    yield use
    for config, before in switched:
        config._attn_implementation_internal = before


@pytest.fixture
def calls(shim):
    """How often each function of the stand-in was called by `flash.py`."""
    counts = {"varlen": 0, "with_kvcache": 0}

    def counted(name):
        def call(*args, **kwargs):
            counts[name] += 1
            return getattr(SHIM, name)(*args, **kwargs)

        return call

    shim(**{name: counted(name) for name in counts})
    return counts


@pytest.fixture
def without_sdpa(monkeypatch):
    """Transformers' sdpa must not be called."""

    def refuse(*args, **kwargs):
        raise AssertionError("sdpa was called")

    return lambda: monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse)


STORED = head(0) + A + B + C + question(0)
MOVED = head(1, 13) + C + A + B + question(1)


def make_flash_model(kind: str):
    return make_model(kind, **({"head_dim": 16} if kind in ("gemma3_text", "qwen3") else {}))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_moved_text_runs_through_flash(on_flash, calls, without_sdpa, kind):
    model = make_flash_model(kind)
    want = ask(model, MOVED, stored(model, STORED))
    stock = on_flash(model)
    cache = stored(model, STORED)
    calls["varlen"] = 0
    stock.calls.clear()
    without_sdpa()
    got = ask(model, MOVED, cache)
    assert got.report.shifted_tokens and got.report.repaired_tokens, got.report.reason
    same_answer(got, want)  # as under sdpa
    assert calls["varlen"] > 0 and calls["varlen"] % model.config.num_hidden_layers == 0
    assert set(stock.calls) == {1}  # decoding without pads is stock's: it copies nothing


def test_control_moved_text_under_another_alignment(on_flash, calls, monkeypatch):
    model = make_flash_model("llama")
    want = ask(model, MOVED, stored(model, STORED))
    on_flash(model)
    cache = stored(model, STORED)
    monkeypatch.setattr(flash_shim, "visible", upper_left)
    got = ask(model, MOVED, cache)
    assert calls["varlen"] and max_difference(got.scores[:1], want.scores[:1]) > 1e-2


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text"])
def test_padded_batch_decodes_through_flash(on_flash, calls, without_sdpa, kind):
    """Stock copies all keys at every token to leave the pads out."""
    model = make_flash_model(kind)
    rows = [MOVED, MOVED[:40], STORED[:97]]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    options = dict(attention_mask=(ids != 0).long(), pad_token_id=0)
    want = ask(model, ids, **options)
    stock = on_flash(model)
    cache = stored(model, question(3), fidelity="exact")  # measures the model, which runs padded rows too
    for _ in range(2):
        calls["with_kvcache"] = 0
        stock.calls.clear()
        same_answer(ask(model, ids, cache, **options), want)
        layers = model.config.num_hidden_layers
        assert calls["with_kvcache"] >= 5 * layers  # every token after the first
        assert 1 not in stock.calls  # the prompt alone
        without_sdpa()
    assert cache.last_report.exact_tokens > 0


def test_without_the_library_passes_run_as_sdpa(on_flash, monkeypatch):
    model = make_flash_model("llama")
    want = ask(model, MOVED, stored(model, STORED))
    on_flash(model)
    monkeypatch.setattr(flash, "library", lambda: None)
    same_answer(ask(model, MOVED, stored(model, STORED)), want)


@pytest.mark.parametrize("policy", [None, Deviation()])
def test_layers_that_flash_cannot_do_run_as_sdpa(on_flash, calls, monkeypatch, policy):
    """A view at the end of its slab has no room for the last layer's last page."""
    model = make_flash_model("llama")
    options = {} if policy is None else {"repair": policy}
    want = ask(model, MOVED, stored(model, STORED, **options))
    on_flash(model)
    pages, refused = flash._pages, []

    def no_page(tensor, last_page):
        refused.append(1)
        return None if len(refused) % 3 == 0 else pages(tensor, last_page)

    monkeypatch.setattr(flash, "_pages", no_page)
    same_answer(ask(model, MOVED, stored(model, STORED, **options)), want)
    assert (calls["varlen"] and refused) or policy is not None
