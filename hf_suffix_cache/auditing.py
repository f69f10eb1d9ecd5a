"""After the answer: a share of approximate requests is run in full as well, to see whether the prediction was true."""

import logging

from .bound.audit import AuditRecord
from .generation import Refused
from .settling import exact_rerun
from .signals import divergence

logger = logging.getLogger("hf_suffix_cache")


def audit_answer(handle, model, request, auditor) -> AuditRecord | None:
    """
    Run a request's prompts exactly, if its turn has come, and record the predicted and the true KL of the first token;
    of a batch the largest; returns the record, if there is one. What is run is stored if the call was, and replaces
    approximate rows. The answer is out, so a fault is logged and not raised.

    A request under a bound that ended in a full prefill counts too, with a true KL of 0: the guarantee of a
    calibration is a share of all requests under the bound.
    """
    report, bound = request.report, request.config.max_kl
    approximate = report.shifted_tokens + report.carried_tokens > 0
    if not approximate and (bound is None or report.level is None):
        return None
    if not auditor.is_due():
        return None
    predicted = float("nan") if report.expected_kl is None else report.expected_kl
    try:
        true = _true_kl(handle, model, request) if approximate else 0.0
    except Refused:
        logger.debug("not audited", exc_info=True)
        return None
    except Exception:
        logger.warning("an audit failed: the answer stands unchecked", exc_info=True)
        return None
    if true is None:
        return None
    record = auditor.record(predicted, true, bound)
    warning = auditor.warning()
    if warning is not None:
        logger.warning(warning)
    return record


def _true_kl(handle, model, request) -> float | None:
    """The largest KL(full prefill || served) of the request's prompts, nats; None if what was served is not known."""
    served = request.first_logits
    if served is None:
        return None
    found = []
    for number, row in enumerate(request.rows):
        exact = exact_rerun(handle, model, row.ids, store=request.config.store, with_types=request.with_types)
        found.append(max(0.0, divergence(exact, served[number * request.batch.group])))
    return max(found, default=None)
