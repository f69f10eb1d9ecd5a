"""
kvboost's engine with an fp32 model handed to it: its own `from_pretrained` loads half precision, which is slow on a
CPU. Cold runs are its own baseline mode, which neither reads nor writes its cache.
"""

import time

import torch
from kvboost.engine import GenerationMode, InferenceEngine
from protocol import serve
from transformers import AutoModelForCausalLM, AutoTokenizer

CACHE_BYTES = 8 << 30
CHUNKS = 4096


def make(job: dict):
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.eos_token = None  # so that answers have the same length
    engine = InferenceEngine(model, tokenizer, max_cache_bytes=CACHE_BYTES, max_chunks=CHUNKS, device="cpu")
    engine._encode = list  # it takes text only; the other peers get these very ids

    def run(ids: list[int], reuse: bool) -> dict:
        times, answer = [], []

        def note(token: int) -> None:
            times.append(time.perf_counter())
            answer.append(int(token))

        start = time.perf_counter()
        result = engine.generate(
            ids,
            max_new_tokens=job["new_tokens"],
            mode=GenerationMode.CHUNK_KV_REUSE if reuse else GenerationMode.BASELINE,
            on_token=note,
        )
        total = time.perf_counter() - start  # its own clock leaves look-up, seams and storing out
        return {"first": times[0] - start, "total": total, "cached": result.cached_tokens, "answer": answer}

    return run


if __name__ == "__main__":
    serve(make)
