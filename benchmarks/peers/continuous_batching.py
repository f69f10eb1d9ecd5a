"""
transformers' continuous batching with block sharing (its prefix cache), one request at a time. The cold runs go to a
second manager over the same model, without block sharing.
"""

import time

from protocol import serve, timed
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.common import load_model

PAGE = 32  # tokens; the default of 256 would share less
BATCH_TOKENS = 512  # rows of one forward; a prompt is prefilled in pieces of it


def make(job: dict):
    model, _ = load_model("smollm2", job["threads"])
    blocks = 3 * job["longest"] * len(job["prompts"]) // (2 * PAGE) + 64  # nothing is evicted
    managers = {
        sharing: manager(model, sharing, blocks if sharing else 2 * job["longest"] // PAGE, job)
        for sharing in (True, False)
    }

    matches = watched(managers[True])

    def run(ids: list[int], reuse: bool) -> dict:
        engine = managers[reuse]
        matches.clear()

        def tokens():
            name = engine.add_request(ids, streaming=True, max_new_tokens=job["new_tokens"], eos_token_id=-1)
            count = 0
            while count < job["new_tokens"]:
                result = engine.get_result(name, timeout=300)
                if result is None or result.error:
                    raise RuntimeError(f"the manager gave {result and result.error} after {count} tokens.")
                yield from result.generated_tokens[count:]
                count = len(result.generated_tokens)

        first, total, answer = timed(tokens())
        return {"first": first, "total": total, "cached": sum(matches), "answer": answer}

    return run


def manager(model, sharing: bool, blocks: int, job: dict):
    """A started manager; the model's attention is switched to the paged one, for both."""
    made = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=job["new_tokens"], eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=blocks,
            max_batch_tokens=BATCH_TOKENS,
            allow_block_sharing=sharing,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )
    made.start()
    return made


def watched(engine) -> list[int]:
    """A list that gets the length of every match of the prefix cache; transformers 5.24 only logs it."""
    while engine.batch_processor is None:  # made by the manager's own thread
        time.sleep(0.05)
    matches, search = [], engine.batch_processor.cache.search_prefix_match

    def search_prefix_match(*arguments):
        matches.append(search(*arguments))
        return matches[-1]

    engine.batch_processor.cache.search_prefix_match = search_prefix_match
    return matches


if __name__ == "__main__":
    serve(make)
