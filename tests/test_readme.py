"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import pytest

import hf_suffix_cache
from hf_suffix_cache import SuffixCache, SuffixCacheConfig
from reference import ask, check_report, stored
from tiny_models import A, B, C, head, make_model, question

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_the_policy_of_the_readme_repairs():
    (source,) = (block for block in BLOCKS if "def select" in block)
    names = {"SuffixCache": SuffixCache}
    exec(source, names)
    model = make_model("llama")
    cache = stored(model, head(0) + A + B + C + question(0))
    answer = ask(model, head(1) + C + B + A + question(1), cache.using(repair=names["cache"].config.repair))
    check_report(answer.report)
    # all of its runs are shorter than 64 tokens, so all of them are recomputed
    assert answer.report.repaired_tokens == len(A + B + C) and answer.report.shifted_tokens == 0


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_python(block):
    compile(block, "README.md", "exec")


def test_names_of_the_readme_exist():
    for name in set(re.findall(r"`cache\.(\w+)", README)):
        assert hasattr(SuffixCache, name), name
    for name in set(re.findall(r"`hf_suffix_cache\.(\w+)", README)) - {"repair"}:
        assert hasattr(hf_suffix_cache, name), name
    fields = SuffixCacheConfig.__dataclass_fields__
    for settings in re.findall(r"SuffixCache\(([^)`]*)\)`", README):
        for name in re.findall(r"(\w+)=", settings):
            assert name in fields, name


def test_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
