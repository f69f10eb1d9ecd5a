"""Settings: wrong ones are refused by name, value and range; JSON; keywords and config objects."""

import pytest

from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from reference import ask
from tiny_models import make_model, new_text, old_text

PROMPT = old_text(48, 1)

WRONG = {
    "fidelity": "best",
    "repair_fraction": 1.5,
    "seam_tokens": -1,
    "tail_tokens": 0,
    "min_match_tokens": 7,
    "keep_conversations": -1,
    "store_dtype": "float8",
    "compact_waste": 1.5,
    "block_size": 0,
    "max_bytes": 0,
    "ttl": -1.0,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_name_field_value_and_range(name):
    for make in (SuffixCache, SuffixCacheConfig):
        with pytest.raises(ValueError) as caught:
            make(**{name: WRONG[name]})
        assert name in str(caught.value) and str(WRONG[name]) in str(caught.value)


@pytest.mark.parametrize("call", [lambda: SuffixCache(repair=3), lambda: SuffixCache(no_such_field=1)])
def test_wrong_types_and_unknown_names_raise_type_errors(call):
    with pytest.raises(TypeError):
        call()


def test_using_refuses_wrong_settings():
    cache = SuffixCache()
    with pytest.raises(ValueError, match="fidelity"):
        cache.using(fidelity="best")
    with pytest.raises(TypeError):
        cache.using(block_size=8)  # a setting of the store, not of a call


def test_config_object_and_keywords_mean_the_same():
    config = SuffixCacheConfig(fidelity="fast", seam_tokens=2)
    assert SuffixCacheConfig.from_json(config.to_json()) == config
    model = make_model("llama")
    for cache in (SuffixCache(config), SuffixCache(fidelity="fast", seam_tokens=2)):
        ask(model, new_text(9, 1) + PROMPT + new_text(33, 2), cache)
        report = ask(model, new_text(5, 3) + PROMPT + new_text(33, 4), cache).report
        assert report.computed_rows == report.new_tokens + report.repaired_tokens
