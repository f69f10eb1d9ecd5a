"""
What it costs to find out whether the model still computes as it did when rows were stored: one look at each call
(SmolLM2-135M-Instruct, fp32; 274 tensors in 397 modules). Run it alone on the machine.

* The demo model, before prompts of up to 200 tokens and above; its weights sampled by torch's means, as on another
  device, in place of one gather over memory; with a LoRA adapter on q, k, v and o of every layer. Target: 1 ms.
* A change: the first look at a model, and an adapter that is switched off and on again.

    python -m benchmarks.identity             # a minute
    python -m benchmarks.identity --n 20 --output .cache/look
"""

import time
from dataclasses import dataclass
from unittest import mock

import numpy as np
import peft

from benchmarks.common import Options, Results, parse
from hf_suffix_cache.attention import own_implementation
from hf_suffix_cache.identity import IdentityTable, refusal, sample
from scripts.smollm2 import load

TARGET_MS = 1.0
SHORT, LONG = 200, 201  # tokens: up to which weights on another device are not sampled, and from which they are


@dataclass
class IdentityOptions(Options):
    """`n` looks of each kind; one thread, since a look runs on one."""

    n: int = 200
    threads: int = 1


def main() -> None:
    options = parse(IdentityOptions, __doc__)
    model, _ = load(threads=options.threads)
    results = Results("identity", "SmolLM2-135M-Instruct", "float32", options)
    measure_first(model, options, results)
    measure_looks(model, "demo model", options, results)
    with mock.patch.object(sample, "_is_plain_memory", lambda tensor: False):
        measure_looks(model, "demo model, sampled by torch", options, results)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, "A").eval()
    measure_looks(model, "LoRA on q, k, v, o", options, results)
    measure_switches(model, wrapped, options, results)


def look(table: IdentityTable, model, tokens: int) -> float:
    """Seconds of what a call does before it looks for rows."""
    started = time.perf_counter()
    if refusal(model) is not None:
        raise RuntimeError(f"this model is not refused, or nothing is measured: {refusal(model)}")
    table.get(model, tokens)
    return time.perf_counter() - started


def measure_looks(model, case: str, options: IdentityOptions, results: Results) -> None:
    """Looks at a model that has not changed."""
    table = IdentityTable(own_implementation)
    identity, _ = table.get(model, LONG)
    for tokens, prompts in ((SHORT, "up to 200 tokens"), (LONG, "above 200 tokens")):
        taken = np.array([look(table, model, tokens) for _ in range(options.n)]) * 1e3
        if table.get(model, tokens) != (identity, []):
            raise RuntimeError("the model's identity changed while it was measured")
        note = f"target <= {TARGET_MS} ms; median, with quartiles; {len(identity.references)} tensors"
        results.add(case, f"look, prompts {prompts}", np.median(taken), "ms", options.n, *quartiles(taken), note)


def measure_first(model, options: IdentityOptions, results: Results) -> None:
    """The first look at a model: its attributes are sorted, its sample is planned and read."""
    number = max(1, options.n // 10)
    taken = np.array([look(IdentityTable(own_implementation), model, LONG) for _ in range(number)]) * 1e3
    note = "median, with quartiles; once per state of a model"
    results.add("demo model", "first look", np.median(taken), "ms", number, *quartiles(taken), note)


def measure_switches(model, wrapped, options: IdentityOptions, results: Results) -> None:
    """Looks just after an adapter was switched off, or on again: the state is known from before."""
    table, taken, states = IdentityTable(own_implementation), [], set()
    for number in range(2 + max(2, options.n // 10)):
        (wrapped.base_model.disable_adapter_layers, wrapped.base_model.enable_adapter_layers)[number % 2]()
        seconds = look(table, model, LONG)
        states.add(table.get(model, LONG)[0])
        if number >= 2:
            taken.append(seconds * 1e3)
    if len(states) != 2:
        raise RuntimeError(f"an adapter that is on or off gives two states, not {len(states)}")
    note = "median, with quartiles; the state is known from before"
    case = "LoRA on q, k, v, o"
    results.add(case, "look after a switch", np.median(taken), "ms", len(taken), *quartiles(np.array(taken)), note)


def quartiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


if __name__ == "__main__":
    main()
