"""One `generate` call as all benchmarks make it, and what they read from it: logits, times, divergence."""

import time
from dataclasses import dataclass

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.common import synchronize

_VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE_ARGUMENT = "cache" if _VERSION >= (5, 24) else "past_key_values"  # transformers renamed it in 5.24


class Forced(transformers.LogitsProcessor):
    """
    Makes `generate` take the given tokens whatever the logits say, so that two runs can be compared token by token
    (`output_logits=True` hands out the logits before this).

    Args:
        prompt_length (`int`): Tokens before the first generated one.
        tokens (`list[int]`): What is to be generated.
    """

    def __init__(self, prompt_length: int, tokens: list[int]):
        self.prompt_length, self.tokens = prompt_length, tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[input_ids.shape[1] - self.prompt_length]] = 0.0
        return forced


class Clock(BaseStreamer):
    """Notes when each generated token arrives. `generate` hands a streamer the prompt first, which is not a token."""

    def __init__(self):
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value) -> None:
        if self._prompt_seen:
            synchronize()
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        pass


class _Stamps:
    """Stands in for a streamer's queue of text: notes when each piece arrives."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, text: str, timeout=None) -> None:
        if text is not None:
            synchronize()
            self.times.append(time.perf_counter())


class _Lines:
    """Stands in for a tokenizer: every token is a line, which a streamer hands on at once."""

    def decode(self, tokens, **options) -> str:
        return "\n"


def stamping_streamer() -> tuple[transformers.TextIteratorStreamer, list[float]]:
    """
    A streamer of transformers' own, as users pass it, and the list that the times of one prompt's tokens go to. Behind
    a class of the caller's, such as `Clock`, a SuffixCache asks after each token whether the model is still the same.
    """
    streamer, stamps = transformers.TextIteratorStreamer(_Lines(), skip_prompt=True), _Stamps()
    streamer.text_queue = stamps
    return streamer, stamps.times


@dataclass(frozen=True)
class Answer:
    """
    What one call gave.

    Args:
        ids (`list[int]`): Generated tokens.
        first (`float`): Seconds until the first of them arrived.
        total (`float`): Seconds of the whole call, storing included.
        steps (`list[float]`): Seconds from each token to the next.
        logits (`torch.Tensor` or `None`): `[generated, vocabulary]`, if asked for.
    """

    ids: list[int]
    first: float
    total: float
    steps: list[float]
    logits: torch.Tensor | None


def ask(model, ids: list[int], new_tokens: int, cache=None, logits: bool = False, forced=None) -> Answer:
    """
    Generate exactly `new_tokens` tokens greedily after the prompt `ids`.

    Args:
        cache (`SuffixCache`, handle, `transformers.Cache` or `None`): `None` is stock transformers.
        logits (`bool`): Hand out the raw logits of every generated token.
        forced (`list[int]`, *optional*): Tokens to generate instead of the greedy ones.
    """
    prompt = torch.tensor([ids], device=model.device)
    streamer, times = stamping_streamer()
    options = {} if cache is None else {CACHE_ARGUMENT: cache}
    if forced is not None:
        options["logits_processor"] = transformers.LogitsProcessorList([Forced(len(ids), forced)])
    if logits:  # not otherwise: a returned dict hands the view to the caller, and the next turn then copies
        options |= {"output_logits": True, "return_dict_in_generate": True}
    synchronize()
    start = time.perf_counter()
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        streamer=streamer,
        **options,
    )
    synchronize()
    total = time.perf_counter() - start
    tokens = (out.sequences if logits else out)[0, len(ids) :].tolist()
    rows = torch.cat(out.logits).float().cpu() if logits else None
    steps = [later - sooner for sooner, later in zip(times, times[1 : len(tokens)], strict=False)]
    return Answer(tokens, times[0] - start, total, steps, rows)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) in nats at temperature 1, from logits `[..., vocabulary]`, summed in fp64."""
    p = torch.log_softmax(reference.double(), dim=-1)
    q = torch.log_softmax(other.double(), dim=-1)
    return (p.exp() * (p - q)).sum(dim=-1)


def timing(report, name: str) -> float:
    """Seconds of one phase of a `ReuseReport`."""
    return report.timings[name] if isinstance(report.timings, dict) else getattr(report.timings, name)
