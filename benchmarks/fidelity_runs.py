"""
What the fidelity benchmark measures of one prompt: full prefill, kept on disk, and the same prompt with a cache.

Full prefill is stock transformers, so its logits are kept by model, prompt and versions, whatever the package's own
source: `fidelity/<model>/` in the cache folder.
"""

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.calls import CACHE_ARGUMENT, ask, kl_divergence
from benchmarks.common import MODELS, synchronize
from benchmarks.sources import cache_home


@dataclass(frozen=True)
class Reference:
    """
    What full prefill gave for a prompt.

    Args:
        ids (`list[int]`): Greedy continuation, EOS not allowed.
        first (`torch.Tensor`): `[vocabulary]`, log probabilities of the first token, fp32.
        forced (`torch.Tensor`): `[tokens - 1, vocabulary]`, those of the later tokens, fp16 on disk.
        seconds (`float`): Time to first token.
    """

    ids: list[int]
    first: torch.Tensor
    forced: torch.Tensor
    seconds: float


class References:
    """
    Full-prefill answers of one model, from disk where they are there.

    Args:
        model: The transformers model, or `None` to read only.
        name (`str`): A key of `MODELS`.
        tokens (`int`): Tokens of each continuation, the first included.
    """

    def __init__(self, model, name: str, tokens: int):
        self.model, self.name, self.tokens = model, name, tokens
        self.folder = cache_home() / "fidelity" / name

    def path(self, ids) -> Path:
        """File of a prompt."""
        settings = [MODELS[self.name], self.tokens, torch.__version__, transformers.__version__, list(ids)]
        return self.folder / f"{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:24]}.npz"

    def get(self, ids) -> Reference:
        """The answer to a prompt, computed and kept if it isn't there yet."""
        path = self.path(ids)
        if not path.exists():
            answer = ask(self.model, list(ids), self.tokens, logits=True)
            rows = torch.log_softmax(answer.logits.double(), dim=-1)
            parts = {"ids": np.array(answer.ids), "seconds": np.array(answer.first)}
            parts |= {"first": rows[0].float().numpy(), "forced": rows[1:].half().numpy()}
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.savez(file, **parts)
            partial.replace(path)
        with np.load(path) as parts:
            first, forced = torch.from_numpy(parts["first"]), torch.from_numpy(parts["forced"]).float()
            return Reference(parts["ids"].tolist(), first, forced, float(parts["seconds"]))


@dataclass(frozen=True)
class Measured:
    """
    What one way of serving a prompt gave: `first` `[vocabulary]` and `forced` `[tokens - 1, vocabulary]` logits,
    seconds to the first token, and the report (`None` for stock).
    """

    first: torch.Tensor
    forced: torch.Tensor
    seconds: float
    report: object = None

    def against(self, full: Reference) -> dict[str, float]:
        """Divergences from full prefill, nats, and how often both would choose the same token."""
        forced = kl_divergence(full.forced[: len(self.forced)], self.forced)
        best = torch.cat([full.first[None], full.forced[: len(self.forced)]]).argmax(-1)
        own = torch.cat([self.first[None], self.forced]).argmax(-1)
        return {
            "first": max(0.0, float(kl_divergence(full.first, self.first))),
            "forced": max(0.0, float(forced.mean())) if len(forced) else 0.0,
            "same": float((best == own).double().mean()),
        }


def served(model, ids, handle, continuation: list[int]) -> Measured:
    """
    One call with a cache: the first token through `generate`, then all of `continuation` but its last token in one
    forward over the view that the call hands out, which is far cheaper than token by token.
    """
    prompt = torch.tensor([list(ids)], device=model.device)
    synchronize()
    start = time.perf_counter()
    out = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=1,
        output_logits=True,
        return_dict_in_generate=True,
        **{CACHE_ARGUMENT: handle},
    )
    synchronize()
    seconds = time.perf_counter() - start
    report = handle.last_report
    seconds = report.timings["first_token"] or seconds
    view = out.get("past_key_values", out.get("cache"))
    return Measured(out.logits[0][0].float().cpu(), continued(model, view, continuation), seconds, report)


def in_chunks(model, ids, continuation: list[int]) -> Measured:
    """Stock transformers in two forwards instead of one: what rounding alone does to a prompt."""
    cache, half = transformers.DynamicCache(config=model.config), len(ids) // 2
    prompt = torch.tensor([list(ids)], device=model.device)
    start = time.perf_counter()
    with torch.no_grad():
        model(prompt[:, :half], **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
        out = model(prompt[:, half:], **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1)
    seconds = time.perf_counter() - start
    return Measured(out.logits[0, -1].float().cpu(), continued(model, cache, continuation), seconds)


def continued(model, cache, continuation: list[int]) -> torch.Tensor:
    """Logits `[len(continuation) - 1, vocabulary]` after each forced token but the last."""
    if len(continuation) < 2:
        return torch.empty(0, model.get_output_embeddings().weight.shape[0])
    forced = torch.tensor([continuation[:-1]], device=model.device)
    start = cache.get_seq_length()
    with torch.no_grad():
        out = model(
            forced,
            position_ids=torch.arange(start, start + forced.shape[1], device=model.device)[None],
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
        )
    return out.logits[0].float().cpu()


def spoken(tokenizer, ids: list[int], chosen=None, stop: tuple[int, ...] = ()) -> str:
    """
    The text of an answer: up to its first line end, and up to where a token of `stop` was, or would have been,
    chosen.

    Args:
        chosen (`list[int]`, *optional*): Best token at each step, where the generated ones were not free to stop.
    """
    end = next((at for at, token in enumerate(chosen or ids) if token in stop), len(ids))
    return tokenizer.decode(ids[:end], skip_special_tokens=True).strip().split("\n")[0].strip()


def stop_tokens(model) -> tuple[int, ...]:
    """Tokens that end an answer."""
    stop = model.generation_config.eos_token_id
    return tuple(stop) if isinstance(stop, (list, tuple)) else () if stop is None else (stop,)
