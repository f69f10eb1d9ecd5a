"""Precomputing texts before anybody asks for them."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .capability import Capability, input_device
from .config import PoolExhausted, UnsupportedModelError
from .store import pins
from .store.filing import Filing
from .store.index import common_prefix
from .store.pool import LayerShape
from .store.scopes import Scope
from .store.store import Store

SINK_TOKENS = 16
BATCH_ROWS, BATCH_TEXTS = 2048, 32  # of one forward
PLACES = ("anywhere", "front")


@dataclass(frozen=True)
class Pins:
    """
    Where texts of a model are pinned.

    Args:
        store (`Store`), identity, scope (`Scope`): Of which rows.
        shapes (`tuple` of `LayerShape`): The model's layers.
    """

    store: Store
    identity: object
    scope: Scope
    shapes: tuple[LayerShape, ...]

    def check(self, texts: list[list[int]]) -> None:
        """Raise `ValueError` if these texts, pinned as well, would pass the share of the store that pins may have."""
        arrays = [np.array(ids, dtype=np.int64) for ids in texts]
        pins.check_share(self.store, self.identity, self.scope, self.shapes, arrays)

    def add(self, ids: list[int]) -> None:
        """Pin a text that was stored just now; raises `PoolExhausted` if it was not."""
        if not pins.pin(self.store, self.identity, self.scope, np.array(ids, dtype=np.int64)):
            raise PoolExhausted(
                f"a text of {len(ids):,} tokens found no room in the store, so it can't be pinned: running calls, or "
                "other pins, hold too much of it."
            )


def into(where: tuple, pin: bool, folder) -> tuple[Pins | None, Callable[[], Filing] | None]:
    """What pins texts, or writes them to a folder; `where` are the arguments of `Pins`."""
    if not isinstance(pin, bool):
        raise TypeError(f"`pin` must be True or False, got {pin!r}.")
    if pin and folder is not None:
        raise ValueError("texts in a folder need no pin: they are not given up for room.")
    return Pins(*where) if pin else None, None if folder is None else functools.partial(Filing, *where, folder)


def register(
    handle,
    model: PreTrainedModel,
    texts_or_ids,
    tokenizer,
    at: str,
    pinning: Pins | None = None,
    filing: Callable[[], Filing] | None = None,
) -> int:
    """
    See `SuffixCache.register`.

    Args:
        handle (`SuffixCache`): What the texts run through.
        pinning (`Pins`, *optional*), filing (callable, *optional*): Given if they are to be pinned, or to go to a
            folder.
    """
    check_tokenizer(tokenizer)
    texts = [encode(text, tokenizer, special_tokens=at == "front") for text in _as_list(texts_or_ids)]
    vocabulary = model.get_input_embeddings().num_embeddings
    for ids in texts:
        check_ids(model, ids)
    sink = _sink_prefix(tokenizer, vocabulary) if at == "anywhere" else []
    prompts = [sink + ids for ids in texts]
    if filing is not None:
        _register_to_folder(handle, model, prompts, filing())
        return sum(len(ids) for ids in texts)
    if pinning is not None:
        pinning.check(prompts)
    for ids in tqdm(prompts, desc="registering", disable=len(texts) < 2):
        _run(handle, model, [ids])
        if pinning is not None:
            pinning.add(ids)
    return sum(len(ids) for ids in texts)


def _run(handle, model: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Have prompts stored, which are padded on the left where their lengths differ."""
    device, columns = input_device(model), max(map(len, prompts))
    inputs = torch.tensor([[0] * (columns - len(ids)) + ids for ids in prompts], device=device)
    mask = torch.tensor([[0] * (columns - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
    # one token is generated and dropped: prefill is all that is wanted, and it is an ordinary exact call
    model.generate(inputs, attention_mask=mask, cache=handle, max_new_tokens=1, do_sample=False, num_beams=1)


def _register_to_folder(handle, model: PreTrainedModel, prompts: list[list[int]], filing: Filing) -> None:
    """What is there already, of an earlier run, is left as it is. Whatever ends this, what was done is written."""
    missing = filing.missing(prompts)
    different = len(set(map(tuple, prompts)))
    pads = handle.capability(model).takes_positions
    with tqdm(total=different, initial=different - len(missing), desc="registering", disable=different < 2) as shown:
        try:
            for batch in _batches(missing, min(BATCH_ROWS, filing.max_rows), pads):
                _run(handle, model, batch)
                filing.done(batch)
                shown.update(len(batch))
        finally:
            filing.close()


def _batches(prompts: list[list[int]], rows: int, pads: bool) -> Iterator[list[list[int]]]:
    """
    Prompts of about equal lengths together: with their padding, not more than so many rows, or a single one. Without
    `pads` they are equally long. The longest come first: the memory that they leave behind fits all others.
    """
    batch: list[list[int]] = []
    for ids in sorted(prompts, key=len, reverse=True):
        full = batch and ((len(batch) + 1) * len(batch[0]) > rows or len(batch) == BATCH_TEXTS)
        if full or (batch and not pads and len(ids) < len(batch[0])):
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


def system_turn(tokenizer, content: str) -> tuple[int, ...]:
    """
    Token ids that all prompts of a chat template begin with whose system turn says `content`: for `share_prefix`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a chat template that has a system turn.
        content (`str`): What the system turn says, the same for every user.

    Returns:
        `tuple[int]`: Up to where the first user's own words begin. Raises `ValueError` if the template leaves the
        system turn out.
    """
    check_tokenizer(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this tokenizer has no chat template; give `share_prefix` the token ids themselves.")
    if not isinstance(content, str) or not content:
        raise ValueError(f"`content` must be a system prompt, got {content!r}.")
    rendered = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": content}, {"role": "user", "content": user}], tokenize=False
        )
        for user in ("a", "Z")
    ]
    if content.strip() not in rendered[0]:
        raise ValueError("this tokenizer's chat template does not show the system turn.")
    first, second = (np.array(encode(text, tokenizer, special_tokens=False), dtype=np.int64) for text in rendered)
    return tuple(first[: common_prefix(first, second)].tolist())


def _as_list(texts_or_ids) -> list:
    """One text or a list of texts, each a string or a sequence of ids."""
    if isinstance(texts_or_ids, str):
        return [texts_or_ids]
    if isinstance(texts_or_ids, (torch.Tensor, np.ndarray)):
        return list(texts_or_ids) if texts_or_ids.ndim == 2 else [texts_or_ids]
    if not isinstance(texts_or_ids, (list, tuple)):
        raise TypeError(f"expected a text, token ids, or a list of either, got {type(texts_or_ids).__name__}.")
    texts = list(texts_or_ids)
    if texts and all(isinstance(item, (int, np.integer)) for item in texts):
        return [texts]
    return texts


def check_registrable(model: PreTrainedModel, capability: Capability, at: str) -> None:
    """
    Raise `ValueError` for a place that there is not, and `UnsupportedModelError` for a model whose rows can't be
    stored to be served from there.
    """
    if at not in PLACES:
        raise ValueError(f"`at` must be one of {PLACES}, got {at!r}.")
    if capability.kind == "none" or (capability.kind == "prefix" and at != "front"):
        remedy = ' Only at="front" can be registered.' if capability.kind == "prefix" else ""
        raise UnsupportedModelError(
            f"rows of this {type(model).__name__} can't be registered {at}: {capability.reason}.{remedy}"
        )


def check_ids(model: PreTrainedModel, ids: list[int]) -> None:
    """Raise `ValueError` unless a text has tokens, all of the model's vocabulary."""
    vocabulary = model.get_input_embeddings().num_embeddings
    if len(ids) == 0:
        raise ValueError("a text is empty: it has no token.")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ValueError(f"token ids must be from 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}.")


def check_tokenizer(tokenizer) -> None:
    """Raise `TypeError` for what is neither a tokenizer nor None."""
    if tokenizer is not None and not callable(tokenizer):
        raise TypeError(f"`tokenizer` must be a tokenizer of transformers, got {tokenizer!r}.")


def encode(text, tokenizer, special_tokens: bool) -> list[int]:
    """Token ids of a string, or of a sequence of ids."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("strings need a `tokenizer`; or pass lists of token ids.")
        check_tokenizer(tokenizer)
        return list(tokenizer(text, add_special_tokens=special_tokens)["input_ids"])
    if isinstance(text, (torch.Tensor, np.ndarray)):
        text = (text[0] if text.ndim == 2 and len(text) == 1 else text).tolist()
    if not isinstance(text, (list, tuple)):
        remedy = '; pass its ["input_ids"]' if isinstance(text, Mapping) else ""
        raise TypeError(f"a text is a string or a sequence of token ids, got {type(text).__name__}{remedy}.")
    for item in text:
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(f"a text is a string or a sequence of token ids, integers, got {item!r} among them.")
    return [int(item) for item in text]


def _sink_prefix(tokenizer, vocabulary: int) -> list[int]:
    """
    What a text is run behind when it is precomputed alone: its first token would become an attention sink otherwise.
    BOS and the chat template's empty system turn, else fixed tokens.
    """
    prefix = []
    if tokenizer is not None:
        if tokenizer.bos_token_id is not None:
            prefix.append(tokenizer.bos_token_id)
        if getattr(tokenizer, "chat_template", None):
            turn = tokenizer.apply_chat_template([{"role": "system", "content": ""}], tokenize=False)
            encoded = tokenizer(turn, add_special_tokens=False)["input_ids"]
            prefix += encoded[1:] if encoded[:1] == prefix else encoded
    if len(prefix) < 2:
        prefix += [(7919 * (number + 1)) % vocabulary for number in range(SINK_TOKENS - len(prefix))]
    return prefix
