"""`pipeline("text-generation")` with strings, chats and lists: the same text with a cache as without."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, pipeline

from hf_suffix_cache import SuffixCache
from reference import check_pool, check_report
from tiny_models import make_model

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STORY = "The ferry to the island leaves at nine and comes back before dark. "
FACTS = "Tickets are sold on the pier; children under seven travel free. "
QUESTION = "When does the ferry leave, and who has to pay for the way back?"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII, built here: no download."""
    characters = ["\n"] + [chr(code) for code in range(32, 127)]
    names = ["<pad>", "<s>", "</s>", "<unk>", *characters, *(f"<x{number}>" for number in range(156))]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def make_pipeline():
    model = make_model("llama")
    pipe = pipeline("text-generation", model=model, tokenizer=character_tokenizer())
    model.baseline["generation_config"] = model.generation_config.to_dict()  # the pipeline's own doing
    model.baseline["attributes"] = sorted(set(vars(model)) - {"baseline"})
    return pipe


CALLS = {
    "string": STORY + FACTS + QUESTION,
    "strings": [STORY + QUESTION, STORY + FACTS + QUESTION, STORY],
    "chat": [{"role": "system", "content": STORY}, {"role": "user", "content": QUESTION}],
    "chats": [
        [{"role": "system", "content": STORY}, {"role": "user", "content": text}]
        for text in (QUESTION, FACTS + QUESTION)
    ],
}
OPTIONS = {
    "plain": {},
    "batches": {"batch_size": 2},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "new_text": {"return_full_text": False},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_pipeline_gives_the_same_text(call, options):
    import torch

    pipe, cache = make_pipeline(), SuffixCache(fidelity="exact")
    kwargs = {"max_new_tokens": 6, "do_sample": False, **OPTIONS[options]}
    torch.manual_seed(1)
    want = pipe(CALLS[call], **kwargs)
    for _ in range(4):
        torch.manual_seed(1)
        assert pipe(CALLS[call], cache=cache, **kwargs) == want
        check_report(cache.last_report)
    assert cache.last_report.exact_tokens > 0
    check_pool(cache)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_may_be_given_when_the_pipeline_is_made(name):
    model, cache = make_model("llama"), SuffixCache(fidelity="exact")
    pipe = pipeline("text-generation", model=model, tokenizer=character_tokenizer(), **{name: cache})
    model.baseline["generation_config"] = model.generation_config.to_dict()
    model.baseline["attributes"] = sorted(set(vars(model)) - {"baseline"})
    want = make_pipeline()(CALLS["string"], max_new_tokens=6, do_sample=False)
    for _ in range(4):
        assert pipe(CALLS["string"], max_new_tokens=6, do_sample=False) == want
    assert cache.last_report.exact_tokens == cache.last_report.prompt_tokens - 1


def test_chat_grows_and_loses_its_oldest_turn():
    pipe, cache = make_pipeline(), SuffixCache()
    chat = [{"role": "system", "content": "Be brief."}]
    for text in (STORY, FACTS, QUESTION):
        chat = pipe([*chat, {"role": "user", "content": text}], cache=cache, max_new_tokens=8, do_sample=False)[0][
            "generated_text"
        ]
    assert cache.last_report.carried_tokens == 0
    assert cache.last_report.exact_tokens > len(STORY) + len(FACTS)
    shorter = [chat[0], *chat[3:], {"role": "user", "content": "And who sells the tickets then, I wonder?"}]
    pipe(shorter, cache=cache, max_new_tokens=8, do_sample=False)
    report = cache.last_report
    check_report(report)
    assert report.shifted_tokens + report.repaired_tokens > len(FACTS)


def test_texts_are_registered_with_a_tokenizer():
    pipe, cache = make_pipeline(), SuffixCache()
    cache.register(pipe.model, [STORY, FACTS], tokenizer=pipe.tokenizer)
    pipe("Some head or other. " + FACTS + STORY + QUESTION, cache=cache, max_new_tokens=4)
    report = cache.last_report
    assert report.shifted_tokens + report.repaired_tokens >= len(STORY) + len(FACTS) - 2
