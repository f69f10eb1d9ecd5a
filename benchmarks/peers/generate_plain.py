"""transformers' `generate`, nothing kept from call to call: warm and cold are the same, which shows the noise."""

from protocol import serve

from benchmarks.calls import ask
from benchmarks.common import load_model


def make(job: dict):
    model, _ = load_model("smollm2", job["threads"])

    def run(ids: list[int], reuse: bool) -> dict:
        answer = ask(model, ids, job["new_tokens"])
        return {"first": answer.first, "total": answer.total, "cached": 0, "answer": answer.ids}

    return run


if __name__ == "__main__":
    serve(make)
