"""
llama.cpp's server, in process (xllamacpp), with cache reuse: an exact prefix, shifted runs of at least 64 tokens in
their old order, and prompts kept in memory. It runs the GGUF file itself (Q4_1, keys and values fp16): other weights
than the fp32 that the other peers get. Cold runs go to a second server with all of it off.
"""

import json
import time

from protocol import serve
from xllamacpp import CommonParams, Server

REUSE_TOKENS = 64
CACHE_MIB = 4096
SLACK = 256  # rows of context beyond the longest sequence


def make(job: dict):
    servers = {reuse: server(job, reuse) for reuse in (True, False)}

    def run(ids: list[int], reuse: bool) -> dict:
        request = {
            "prompt": ids,
            "n_predict": job["new_tokens"],
            "temperature": 0.0,
            "cache_prompt": reuse,
            "ignore_eos": True,
            "stream": True,
        }
        times, texts = [], []

        def note(chunk: str) -> bool:
            times.append(time.perf_counter())
            texts.append(chunk)
            return False  # true would stop it

        start = time.perf_counter()
        servers[reuse].handle_completions(json.dumps(request), note)
        chunks = [json.loads(text) for text in texts]
        errors = [chunk for chunk in chunks if "choices" not in chunk]
        if errors:
            raise RuntimeError(f"the server said {errors[0]}.")
        return {
            "first": times[0] - start,
            "total": times[-1] - start,
            "cached": chunks[-1]["timings"]["cache_n"],
            "answer": "".join(chunk["choices"][0]["text"] for chunk in chunks),
        }

    return run


def server(job: dict, reuse: bool) -> Server:
    """A server of one slot."""
    params = CommonParams()
    params.model.path = job["gguf"]
    params.n_ctx = job["longest"] + SLACK
    params.n_parallel = 1
    params.verbosity = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_prompt = reuse
    params.n_cache_reuse = REUSE_TOKENS if reuse else 0
    params.cache_ram_mib = CACHE_MIB if reuse else 0
    return Server(params)


if __name__ == "__main__":
    serve(make)
