"""
vLLM's CPU build with automatic prefix caching, fp32. A cold run carries a salt of its own, so that it shares nothing
with any other.
"""

import itertools
import os

# before vllm is imported: it reads them then
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: nothing else polls on the two cores
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from protocol import serve, timed  # noqa: E402

BLOCK = 32  # tokens


def make(job: dict):
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}" if job["threads"] > 1 else "0"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=job["longest"],
        max_num_batched_tokens=job["longest"],
        max_num_seqs=1,
        block_size=BLOCK,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
    ).llm_engine
    settings = SamplingParams(temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True)
    names = map(str, itertools.count())

    def run(ids: list[int], reuse: bool) -> dict:
        name = next(names)
        prompt = {"prompt_token_ids": ids} | ({} if reuse else {"cache_salt": f"cold {name}"})
        outputs = []

        def steps():
            engine.add_request(name, prompt, settings)
            while engine.has_unfinished_requests():
                outputs.extend(engine.step())
                if outputs:
                    yield outputs[-1]

        first, total, _ = timed(steps())
        answer = list(outputs[-1].outputs[0].token_ids)
        return {"first": first, "total": total, "cached": outputs[-1].num_cached_tokens, "answer": answer}

    return run


if __name__ == "__main__":
    serve(make)
