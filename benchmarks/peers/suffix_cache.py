"""This package, in the same shape as its peers. `variant` is the fidelity: "balanced", "fast" or "exact"."""

from protocol import serve

from benchmarks.calls import ask
from benchmarks.common import load_model
from hf_suffix_cache import SuffixCache


def make(job: dict):
    model, _ = load_model("smollm2", job["threads"])
    cache = SuffixCache(fidelity=job["variant"])

    def run(ids: list[int], reuse: bool) -> dict:
        answer = ask(model, ids, job["new_tokens"], cache=cache if reuse else None)
        cached = 0
        if reuse:  # a repaired token was run after all
            report = cache.last_report
            cached = report.exact_tokens + report.carried_tokens + report.shifted_tokens
        return {"first": answer.first, "total": answer.total, "cached": cached, "answer": answer.ids}

    return run


if __name__ == "__main__":
    serve(make)
