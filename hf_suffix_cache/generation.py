"""The only place that touches transformers' generate: opens, runs and closes a view, and takes the hook off again."""

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

from .attention import begin_forward, end_forward, groupable_configs, ungrouped
from .calls import GenerateCall
from .capability import cache_argument
from .inputs import CACHE_NAMES, Refused, describe_plain
from .report import ReuseReport
from .request import Request
from .view import View

logger = logging.getLogger("hf_suffix_cache")

_lock = threading.RLock()
_at_uninstall: list[Callable[[], None]] = []
_originals: dict[str, object] = {}  # what install has wrapped: methods of GenerationMixin by name
# model -> [count, unhook, configs to switch]
_hooked: "weakref.WeakKeyDictionary[torch.nn.Module, list]" = weakref.WeakKeyDictionary()
_attached: "weakref.WeakKeyDictionary[torch.nn.Module, list]" = weakref.WeakKeyDictionary()  # model -> attachments


def is_suffix_cache(value) -> bool:
    """Whether a value is a store that views can be opened on."""
    if isinstance(value, type) and hasattr(value, "open_view"):
        raise TypeError(f"`cache` is the class {value.__name__}; make an object of it once and pass that.")
    return callable(getattr(value, "open_view", None))


# -- generate ---------------------------------------------------------------------------------------------------


def install() -> None:
    """Wrap `GenerationMixin.generate`, once. A call without a SuffixCache goes straight through."""
    with _lock:
        for name, wrap in (("generate", _wrap), ("_prefill", _wrap_prefill)):
            if name not in _originals:
                _originals[name] = getattr(GenerationMixin, name)
                setattr(GenerationMixin, name, wrap(_originals[name]))


def uninstall() -> None:
    """Put transformers' own generate back. Making a SuffixCache installs the wrapper again."""
    with _lock:
        while _originals:
            setattr(GenerationMixin, *_originals.popitem())
    for stop in _at_uninstall:
        stop()


def at_uninstall(stop: Callable[[], None]) -> None:
    """Have `uninstall` call this too: it ends what goes on after a call's end."""
    _at_uninstall.append(stop)


def _wrap_prefill(original):
    """
    A model class with a generate of its own (MusicGen) brings the SuffixCache itself this far: it is an ordinary
    growing cache there, which must not go on with what an earlier call has left in it.
    """

    @functools.wraps(original)
    def _prefill(self, input_ids, generation_config, model_kwargs, *args, **kwargs):
        for name in CACHE_NAMES:
            if is_suffix_cache(model_kwargs.get(name)):
                model_kwargs[name].reset()
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)

    return _prefill


def _wrap(original):
    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        store = _take_store(kwargs)
        passed = store is not None
        if not passed:
            store = _attached_store(self, kwargs)
        if store is None:
            return original(self, *args, **kwargs)
        for name in CACHE_NAMES:  # those that are left are None
            kwargs.pop(name, None)
        return _generate(original, self, store, args, kwargs, passed)

    return generate


def _take_store(kwargs: dict):
    """Take the SuffixCache out of a call's arguments, if it names one."""
    given = {name: kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None}
    stores = [name for name, value in given.items() if is_suffix_cache(value)]
    if not stores:
        return None
    if len(given) > 1:
        raise ValueError(
            "both `cache` and `past_key_values` were passed, and one of them is a SuffixCache. Pass the SuffixCache "
            "alone: it finds by itself what it has stored of the prompt."
        )
    for name in CACHE_NAMES:
        kwargs.pop(name, None)
    return given[stores[0]]


def _attached_store(model, kwargs: dict):
    """The store that a call is served from which names no cache, if one is attached to the model."""
    attachments = _attached.get(model)
    if not attachments or _is_drafting(kwargs) or any(kwargs.get(name) is not None for name in CACHE_NAMES):
        return None
    return attachments[-1].store


def _is_drafting(kwargs: dict) -> bool:
    """
    Whether this is the inner call with which assisted decoding makes its drafts. With `assistant_early_exit` it comes
    on the main model itself, cut to its first layers, so an attached store must not take it for one of its own.
    """
    return bool(getattr(kwargs.get("generation_config"), "is_assistant", False))


def _generate(original, model, store, args: tuple, kwargs: dict, passed: bool):
    """Run a call with its SuffixCache, which was `passed` to it or is attached to the model."""
    call = GenerateCall(model, args, kwargs)
    started = time.perf_counter()
    other_cache = call.other_cache()
    if other_cache and passed:
        raise ValueError(
            f"{other_cache} and a SuffixCache was passed too: a call has one cache. Set `cache_implementation=None` "
            "there to use the SuffixCache, or leave the SuffixCache out."
        )
    reason = other_cache or ("use_cache=False" if call.get("use_cache") is False else None)
    if reason is None:
        request, reason = _open(model, store, call.request_options())
    if reason is not None:
        output = original(model, *args, **kwargs)
        report = call.plain_report(reason)
        report.timings["total"] = time.perf_counter() - started
        _tell(store, call, report, output)
        return output
    request.started = started
    if request.chunk:
        args, kwargs = call.without_chunks(args, kwargs)
    kwargs[cache_argument(model)] = request.view
    with hooked(model), request.as_found(), closing(request):
        output = original(model, *args, **kwargs)
        request.finish(handed_out=not isinstance(output, torch.Tensor))
    report = request.report
    if request.batch is None and report.reason is None:
        # Phi-3 drops a cache whose prompt crosses its scaling's border
        report = call.plain_report("the model did not use the cache that it was given")
    _tell(store, call, report, output)
    store.answered(model, request)
    return output


def _open(model, store, options: dict) -> tuple[Request | None, str | None]:
    """A request, or why there is none. What the caller asked for and can't have raises `ValueError`."""
    try:
        return store.open_view(model, **options), None
    except Refused as refusal:
        return None, str(refusal)
    except ValueError:
        raise
    except Exception as error:  # no call fails for what reuse needs
        logger.warning("reuse failed, this call runs a full prefill", exc_info=True)
        return None, f"reuse failed: {type(error).__name__}: {error}"


def _tell(store, call: GenerateCall, report: ReuseReport, output) -> None:
    """Record the report of a call. Its answer is there: no fault in counting takes it from the caller."""
    try:
        report.generated_tokens = call.count_generated(output)
    except Exception:
        logger.warning("the tokens of this call's answer are not counted", exc_info=True)
    store.record(report)


@contextmanager
def closing(request: Request):
    """Abort the request if the block raises anything at all, KeyboardInterrupt included."""
    try:
        yield request
    except BaseException:
        request.abort()
        raise


# -- the hook ---------------------------------------------------------------------------------------------------


@contextmanager
def hooked(model):
    """One counted pair of hooks on a model; they act on the view that they find in a forward's arguments."""
    call = object()
    try:  # whatever stands in here is undone also after an interrupt
        with _lock:
            calls, undo, groups = _hooked.setdefault(model, (set(), [], []))
            calls.add(call)
            if len(calls) == 1:
                _take_off(undo)  # what an interrupt has left of an earlier call's
                groups[:] = groupable_configs(model)
                _hook(model, undo)
        yield
    finally:
        end_forward()  # of a forward that an interrupt ended without its hooks
        with _lock:
            calls, undo, _ = _hooked.get(model, (set(), [], []))
            calls.discard(call)
            if not calls:
                _take_off(undo)
                _hooked.pop(model, None)


def _take_off(undo: list[Callable[[], None]]) -> None:
    """Undo in reverse order; each is forgotten only when it is done."""
    while undo:
        undo[-1]()
        undo.pop()


def _hook(model, undo: list[Callable[[], None]]) -> None:
    """Put the pair on a model; what takes it off again goes to `undo`."""
    compiled = vars(model).get("_compiled_call_impl")
    if compiled is not None:
        _hook_compiled(model, compiled, undo)
        return
    undo.append(functools.partial(_unhook, model))  # first: an interrupt may come before a handle is in our hands
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)
    model.register_forward_hook(_after_forward, with_kwargs=True, always_call=True)


def _unhook(model) -> None:
    """Take the pair off, by name; this is what handles of torch do, by number."""
    for name, ours in (("_forward_pre_hooks", _before_forward), ("_forward_hooks", _after_forward)):
        hooks = getattr(model, name)
        for number in [number for number, hook in hooks.items() if hook is ours]:
            del hooks[number]
            for other in (f"{name}_with_kwargs", "_forward_hooks_always_called"):
                getattr(model, other).pop(number, None)


def _hook_compiled(model, compiled, undo: list[Callable[[], None]]) -> None:
    """
    The pair on a model after `model.compile()`, whose call is compiled together with its hooks: a hook that comes and
    goes would compile it anew, or, as hooks are not guarded, never be seen. So the pair goes around the compiled call.
    """

    def call(*args, **kwargs):
        changed = _before_forward(model, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        output = None
        try:
            output = compiled(*args, **kwargs)
        finally:
            _after_forward(model, args, kwargs, output)
        return output

    def unhook():
        if vars(model).get("_compiled_call_impl") is call:  # else compiled anew meanwhile
            model._compiled_call_impl = compiled

    undo.append(unhook)
    model._compiled_call_impl = call


def _before_forward(model, args: tuple, kwargs: dict):
    # a compiled wrapper around the model traces through this hook, and the model itself does not know of it
    if torch.compiler.is_compiling():
        return _prepare(model, args, kwargs, compiled=True)
    return _prepare(model, args, kwargs, compiled=False)


@torch.compiler.disable  # planning is not for a graph
def _prepare(model, args: tuple, kwargs: dict, compiled: bool):
    with ungrouped() if compiled else nullcontext():
        return _prepare_forward(model, args, kwargs)


def _prepare_forward(model, args: tuple, kwargs: dict):
    request = _request_of(model, kwargs)
    if request is None:
        attachments = _attached.get(model)
        if not attachments or _names_cache(model, args, kwargs):
            return None
        args, kwargs = (), _by_name(model, args, kwargs)
        request = attachments[-1].begin(model, kwargs)
        if request is None:
            return args, kwargs
    elif args:
        args, kwargs = (), _by_name(model, args, kwargs)
    if kwargs.get("input_ids") is not None:
        request.view.fed.append(kwargs["input_ids"])
    request.resume()
    try:
        if request.state == "decoding":
            kwargs = request.continued(model, kwargs)
        if request.state == "waiting":
            kwargs = request.prefill(model, kwargs)
        if request.capability.reads_attention:
            begin_forward(_hooked[model][2], **_padding(request, kwargs))
    except BaseException:
        request.pause()
        raise
    return args, kwargs


def _padding(request, kwargs: dict) -> dict:
    """Arguments of `begin_forward` for a batch with pads, whose rows are still those of the prompts."""
    batch, ids = request.batch, kwargs.get("input_ids")
    if ids is None or batch is None or not batch.padded or request.view.altered or len(batch.pads) != len(ids):
        return {}
    queries = ids.shape[1]
    return {"queries": queries, "pads": batch.pads, "total": request.view.get_seq_length() + queries}


@torch.compiler.disable
def _after_forward(model, args: tuple, kwargs: dict, output):
    end_forward()
    request = _request_of(model, kwargs)
    if request is None:
        return None
    try:
        if request.state == "decoding":
            request.forwarded(output is not None)
        elif request.state == "prefill":
            request.prefilled(output)
    finally:
        request.pause()
    attachments = _attached.get(model)
    if attachments:
        attachments[-1].end(request, output is not None)
    return None


def _request_of(model, kwargs: dict) -> Request | None:
    """The open request whose view this forward was given."""
    for name in CACHE_NAMES:
        view = kwargs.get(name)
        if isinstance(view, View) and view.request is not None and view.request.state != "closed":
            return view.request
    return None


def _names_cache(model, args: tuple, kwargs: dict) -> bool:
    """Whether a plain forward brings a cache of its own, or wants none."""
    if kwargs.get("use_cache") is False:
        return True
    named = _by_name(model, args, kwargs)
    return any(named.get(name) is not None for name in CACHE_NAMES)


def _by_name(model, args: tuple, kwargs: dict) -> dict:
    """A forward's arguments, all by name."""
    return {**dict(zip(_parameter_names(type(model)), args, strict=False)), **kwargs}


@functools.lru_cache(maxsize=64)
def _parameter_names(model_class: type) -> tuple[str, ...]:
    import inspect

    return tuple(inspect.signature(model_class.forward).parameters)[1:]


# -- attach -----------------------------------------------------------------------------------------------------


class Attachment:
    """
    Serves the plain forwards of one model. A request ends with its first forward: from then on its view is in the
    caller's hands, who may do with it what he likes, so nothing of later forwards is stored.
    """

    def __init__(self, store):
        self.store = store
        self._open: list[Request] = []

    def begin(self, model, kwargs: dict) -> Request | None:
        """A request for a forward that continues nothing; None if reuse can't serve it."""
        tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
        options = {"batch": None if tokens is None else tokens.shape[0], "attached": True}
        request, reason = _open(model, self.store, options)
        if reason is not None:
            report = ReuseReport(reason=reason)
            if tokens is not None:
                describe_plain(report, tokens, kwargs.get("attention_mask"), None)
                report.computed_rows = tokens.shape[0] * tokens.shape[1]
            self.store.record(report)
            return None
        for name in CACHE_NAMES:  # all None: transformers 5.24 warns of a second name even then
            kwargs.pop(name, None)
        kwargs[cache_argument(model)] = request.view
        self._open.append(request)
        return request

    def end(self, request: Request, whole: bool) -> None:
        """Store a request whose forward has come to its end (`whole`), or drop it."""
        if request in self._open:
            self._open.remove(request)
            with closing(request):
                if whole and request.state == "decoding":
                    request.finish(handed_out=True)
                    self.store.record(request.report)
                else:
                    request.abort()

    def end_all(self) -> None:
        """The model is detached."""
        for request in list(self._open):
            self.end(request, whole=False)


@contextmanager
def attached(model: PreTrainedModel, store):
    """Inside, the model's plain forwards and its generate calls that name no cache are served from the store."""
    attachment = Attachment(store)
    with _lock:
        _attached.setdefault(model, []).append(attachment)
    try:
        with hooked(model):
            yield store
    finally:
        with _lock:
            _attached[model].remove(attachment)
            if not _attached[model]:
                del _attached[model]
        attachment.end_all()
