"""One request with and without the cache, side by side."""

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from .report import ReuseReport


@dataclass(frozen=True)
class Comparison:
    """
    Args:
        kl (`float`): KL(full prefill || with reuse) of the first new token, nats, temperature 1; mean over sequences.
        differing_tokens (`int`): Generated tokens that differ, position by position, over all sequences.
        tokens (`tuple[torch.Tensor, torch.Tensor]`): New tokens of both runs, full and reused,
            `[sequences, tokens]` on the CPU.
        rows (`tuple[int, int]`): Rows run before the first new token: full, reused.
        seconds (`tuple[float, float]`): Time of both calls.
        report (`ReuseReport`): Of the run with the cache.
    """

    kl: float
    differing_tokens: int
    tokens: tuple[torch.Tensor, torch.Tensor]
    rows: tuple[int, int]
    seconds: tuple[float, float]
    report: ReuseReport

    def __str__(self) -> str:
        full, reused = self.seconds
        return (
            f"KL of the first token {self.kl:.4f} nats, {self.differing_tokens} tokens differ; "
            f"rows {self.rows[0]:,} -> {self.rows[1]:,}, seconds {full:.3f} -> {reused:.3f}"
        )


def compare(handle, model: PreTrainedModel, inputs: dict) -> Comparison:
    """
    Run `model.generate(**inputs)` first without and then with the cache. The run with the cache is an ordinary call:
    it is stored and counted. Sampling draws from the global generator in both runs, from the same state.
    """
    if inputs.get("input_ids") is None and inputs.get("inputs_embeds") is None:
        raise ValueError("nothing to compare: pass generate's inputs by name, for example `**tokenizer(text, ...)`.")
    inputs = {**inputs, "return_dict_in_generate": True, "output_logits": True}
    started = time.perf_counter()
    with torch.random.fork_rng():
        full = model.generate(**inputs)
    between = time.perf_counter()
    reused = model.generate(**inputs, cache=handle)
    ended = time.perf_counter()
    report = handle.last_report
    wanted, got = full.logits[0].float().log_softmax(-1), reused.logits[0].float().log_softmax(-1)
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean().item()
    prompt = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    tokens = tuple(output.sequences[:, prompt:].cpu() for output in (full, reused))
    shared = min(part.shape[1] for part in tokens)
    differing = int((tokens[0][:, :shared] != tokens[1][:, :shared]).sum())
    differing += abs(tokens[0].shape[1] - tokens[1].shape[1]) * tokens[0].shape[0]
    batch = full.logits[0].shape[0]
    columns = inputs["input_ids"].shape[1] if "input_ids" in inputs else inputs["inputs_embeds"].shape[1]
    rows = (batch * columns, report.computed_rows)
    return Comparison(max(kl, 0.0), differing, tokens, rows, (between - started, ended - between), report)
