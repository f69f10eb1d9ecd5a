"""
What the scripts of this folder share. It runs in environments that have neither this project nor torch, so it needs
the standard library only.

A script is called with the path of a job, `{"model", "gguf", "threads", "new_tokens", "longest", "variant", "prompts":
[[ids]], "runs": [{"prompt": 0, "reuse": true, "measured": false}]}`, and prints one JSON line per run: the run itself,
`first` and `total` (seconds from handing over the ids to the first and the last new token, look-up and storing
included), `cached` (prompt tokens that were not run, None where the engine does not say) and `answer` (ids or text).
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def serve(make: Callable[[dict], Callable[[list[int], bool], dict]]) -> None:
    """
    Run a job.

    Args:
        make (callable): From the job to a function of token ids and `reuse`, which returns `first`, `total`,
            `cached` and `answer`. With `reuse` false it must neither read nor write what other runs left.
    """
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines print to stdout, some of them from C++
    peer = make(job)
    for run in job["runs"]:
        print(json.dumps(run | peer(job["prompts"][run["prompt"]], run["reuse"])), file=lines, flush=True)
    lines.close()
    sys.stderr.flush()
    os._exit(0)  # threads of engines have been seen to keep a finished process alive


def timed(tokens: Iterator) -> tuple[float, float, list]:
    """Seconds until the first item of `tokens`, until its end, and the items."""
    start = time.perf_counter()
    found, first = [], None
    for token in tokens:
        first = first or time.perf_counter() - start
        found.append(token)
    return first, time.perf_counter() - start, found
