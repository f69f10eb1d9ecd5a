"""What a generate call asks for, read as transformers reads it."""

import copy
import inspect

import numpy as np
import torch

from .inputs import describe_plain
from .report import ReuseReport

# code of the caller's that runs between the forwards of a call
CALLBACKS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "streamer",
    "custom_generate",
    "assistant_model",
)


class GenerateCall:
    """
    A call's options, from its arguments, its generation config and the model's.

    Args:
        model (`PreTrainedModel`): Whose `generate` is called.
        args (`tuple`), kwargs (`dict`): What it is called with, without the cache.
    """

    def __init__(self, model, args: tuple, kwargs: dict):
        self.kwargs = dict(kwargs)
        # positional arguments too, by the names that generate has for them
        self.named = dict(zip(inspect.signature(model.generate).parameters, args, strict=False)) | self.kwargs
        self.passed_config = args[1] if len(args) > 1 else kwargs.get("generation_config")
        self.model_config = model.generation_config
        inputs = kwargs.get("inputs", args[0] if args else None)
        ids = kwargs.get("input_ids")
        self.ids = ids if ids is not None else inputs
        self.embeds = kwargs.get("inputs_embeds")

    def get(self, name: str):
        """An option of the call as transformers reads it (an argument wins, also if None); None if set nowhere."""
        if name in self.kwargs:
            return self.kwargs[name]
        passed = getattr(self.passed_config, name, None)
        return passed if passed is not None else getattr(self.model_config, name, None)

    def other_cache(self) -> str | None:
        """That the call asks for a cache of transformers' own, and where; None if it doesn't."""
        name = "cache_implementation"
        value = self.get(name)
        # the hub's Gemma configurations say "hybrid", which transformers takes for unset since it is its default now
        if value is None or (value == "hybrid" and name not in self.kwargs):
            return None
        if name in self.kwargs:
            where = "this call's arguments"
        elif getattr(self.passed_config, name, None) is not None:
            where = "the `generation_config` that was passed"
        else:
            where = "`model.generation_config`"
        return f"`cache_implementation={value!r}` is set in {where}"

    def without_chunks(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """
        The call's arguments without `prefill_chunk_size`: the request runs its rows in chunks itself. Done in a copy
        of the caller's config, as transformers warns of options beside a config.
        """
        name = "prefill_chunk_size"
        if self.passed_config is not None:
            config = copy.copy(self.passed_config)
            setattr(config, name, None)
            if len(args) > 1:
                args = (args[0], config, *args[2:])
            else:
                kwargs = {**kwargs, "generation_config": config}
        if self.passed_config is None or name in self.kwargs or getattr(self.model_config, name, None) is not None:
            kwargs = {**kwargs, name: None}
        return args, kwargs

    @property
    def prompt(self) -> torch.Tensor | None:
        """Ids or embeddings of the prompt, `[batch, tokens, ...]`."""
        return self.embeds if self.embeds is not None else self.ids

    @property
    def expansion(self) -> int:
        """Batch rows per prompt of the caller's."""
        return max(self.get("num_beams") or 1, self.get("num_return_sequences") or 1)

    @property
    def stops(self) -> set[int]:
        """Ids that end a sequence."""
        stops = self.get("eos_token_id")
        if stops is None:
            return set()
        return {int(stop) for stop in (stops.flatten() if isinstance(stops, torch.Tensor) else np.atleast_1d(stops))}

    def request_options(self) -> dict:
        """Arguments of `open_view`."""
        known = isinstance(self.ids, torch.Tensor) and not self.get("token_healing")
        chunk = self.get("prefill_chunk_size")
        columns = self.ids.shape[1] if known else None
        new_tokens = self.get("max_new_tokens")
        if new_tokens is None and self.get("max_length") is not None and columns is not None:
            new_tokens = max(1, self.get("max_length") - columns)
        return {
            "prompt_columns": columns,
            "caller_rows": self.prompt.shape[0] if self.prompt is not None else None,
            "batch": self.prompt.shape[0] * self.expansion if self.prompt is not None else None,
            "new_tokens": new_tokens,
            "stops": self.stops,
            "pad": self.get("pad_token_id"),
            # what is no size is left to transformers, which raises
            "chunk": chunk if isinstance(chunk, int) and chunk > 0 else None,
            "keep_last": 1,
            "store_answer": (self.get("num_beams") or 1) == 1,
            "watch": any(_may_change_the_model(self.named.get(name)) for name in CALLBACKS),
            "adopt": not self.get("return_dict_in_generate"),
        }

    def plain_report(self, reason: str) -> ReuseReport:
        """Report of a call that ran as if there were no SuffixCache."""
        report = ReuseReport(reason=reason)
        if isinstance(self.prompt, torch.Tensor) and self.prompt.dim() >= 2:
            describe_plain(report, self.prompt, self.kwargs.get("attention_mask"), None)
            report.computed_rows = self.prompt.shape[0] * self.prompt.shape[1] * self.expansion
        return report

    def count_generated(self, output) -> int:
        """Generated tokens over all returned sequences, up to each one's end."""
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        known = self.embeds is None and isinstance(self.ids, torch.Tensor)
        prompt = self.ids.shape[1] if known and sequences.shape[1] >= self.ids.shape[1] else 0
        answers = sequences[:, prompt:].detach().cpu().numpy()
        ended = np.cumsum(np.isin(answers, list(self.stops)), axis=1)
        # a token counts if no stop token stands before it
        return int((np.roll(ended, 1, axis=1)[:, 1:] == 0).sum()) + len(answers) * (answers.shape[1] > 0)


def _may_change_the_model(callback) -> bool:
    """
    Whether a callback could change the model between two forwards: any but transformers' own processors, criteria and
    streamers that hold no code of the caller's. Asking after each token whether it has takes 2 ms on SmolLM2-135M.
    """
    if callback is None:
        return False
    kind = type(callback)
    if kind in (list, tuple):
        return any(map(_may_change_the_model, callback))
    if not kind.__module__.startswith("transformers.generation."):
        return True
    if isinstance(callback, list) and any(map(_may_change_the_model, callback)):
        return True
    held = [value for value in vars(callback).values() if callable(value)]
    return not all(type(value).__module__.startswith(("transformers.", "tokenizers")) for value in held)
