"""
The recipe of transformers' documentation for a shared prefix: keep a prefilled cache, deep-copy it for each request,
generate with the copy. `variant` is the class of the cache, "DynamicCache" or "StaticCache".

The book-keeping is as kind as it can be: the caches of all earlier requests are kept, and the one that shares the
longest beginning with the new prompt is copied and cropped to it.
"""

import copy
import time

import transformers
from protocol import serve

from benchmarks.calls import ask
from benchmarks.common import load_model

LEAST_PREFIX = 64  # tokens; copying a whole cache for less costs more than running them


class PrefixCopies:
    """
    Args:
        model: The model.
        job (`dict`): The job: class of the cache, longest sequence, new tokens.
    """

    def __init__(self, model, job: dict):
        self.model, self.job = model, job
        self.held: list[tuple[list[int], transformers.Cache]] = []  # tokens that were run, and their cache

    def __call__(self, ids: list[int], reuse: bool) -> dict:
        cache, cached, seconds = self.fresh(), 0, 0.0
        if reuse:
            start = time.perf_counter()
            cached, cache = self.copied(ids, cache)
            seconds = time.perf_counter() - start
        answer = ask(self.model, ids, self.job["new_tokens"], cache=cache)
        if reuse:
            self.held.append((ids + answer.ids[:-1], cache))  # the last token is handed out, but never run
        return {
            "first": seconds + answer.first,
            "total": seconds + answer.total,
            "cached": cached,
            "answer": answer.ids,
        }

    def fresh(self) -> transformers.Cache:
        """An empty cache of the job's class."""
        if self.job["variant"] == "StaticCache":
            return transformers.StaticCache(config=self.model.config, max_cache_len=self.job["longest"])
        return transformers.DynamicCache(config=self.model.config)

    def copied(self, ids: list[int], empty: transformers.Cache) -> tuple[int, transformers.Cache]:
        """How many tokens of `ids` the copied cache holds, and the copy; `empty` where too few are shared."""
        shared, tokens, cache = max(
            ((common(ids[:-1], tokens), tokens, cache) for tokens, cache in self.held),
            key=lambda item: item[0],
            default=(0, [], empty),
        )
        if shared < LEAST_PREFIX:
            return 0, empty
        cache = copy.deepcopy(cache)
        if len(tokens) > shared:
            cache.crop(shared - len(tokens))
        return shared, cache


def common(first: list[int], second: list[int]) -> int:
    """Length of the beginning that two lists share."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def make(job: dict):
    return PrefixCopies(load_model("smollm2", job["threads"])[0], job)


if __name__ == "__main__":
    serve(make)
