"""
The demo: four jobs on SmolLM2-135M-Instruct, each request answered by plain `generate()` and with a `SuffixCache`.

For every request it shows both answers, the prompt as a strip coloured by what became of each part, the time to the
first token of both in the same run, the rows that were run, and how far the first token's distribution moved (KL). It
exits non-zero if an answer moved too far, too many rows were run on (a), or no time was saved.

    scripts/demo.sh                    # sets up, then runs this
    python -m scripts.demo --help
"""

import argparse
import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import transformers
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers import LogitsProcessor, LogitsProcessorList

from hf_suffix_cache import ReuseReport, SuffixCache
from scripts.demo_requests import SCENARIOS
from scripts.smollm2 import load


@dataclass(frozen=True)
class Options:
    """The demo's settings; each is a command line option of the same name."""

    fidelity: str = "balanced"
    max_new_tokens: int = 40
    threads: int = 0  # 0: torch's own choice
    max_kl: float = 0.1  # nats, first token, any answer
    max_rows: float = 0.30  # share of the prompt's rows, each request of (a) after its first
    only: str = "abcd"  # letters of the scenarios to run


class FirstToken(LogitsProcessor):
    """Notes when `generate` has the first token's logits, and keeps them. It changes nothing."""

    def __init__(self):
        self.started, self.seconds, self.log_probs = time.perf_counter(), None, None

    def __call__(self, input_ids, scores):
        if self.seconds is None:
            self.log_probs = torch.log_softmax(scores[0].float(), dim=-1).cpu()  # waits for a GPU, as a reader would
            self.seconds = time.perf_counter() - self.started
        return scores


@dataclass(frozen=True)
class Outcome:
    """One request both ways: times in seconds, `kl` = KL(plain || cached) of the first token in nats."""

    plain: str
    cached: str
    plain_seconds: float
    cached_seconds: float
    kl: float
    report: ReuseReport

    @property
    def share(self) -> float:
        """Rows run, as a share of the prompt."""
        return self.report.computed_rows / self.report.prompt_tokens

    @property
    def ratio(self) -> float:
        """Time to the first token with the cache, over that without."""
        return self.cached_seconds / self.plain_seconds


def answer(model, tokenizer, messages, max_new_tokens, **cache):
    """Greedy answer to a chat: its text and the `FirstToken` notes. `cache` is empty or `{"cache": SuffixCache}`."""
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    first = FirstToken()
    ids = model.generate(
        **inputs.to(model.device),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        logits_processor=LogitsProcessorList([first]),
        **cache,
    )
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip(), first


def both_ways(model, tokenizer, cache, messages, options, plain_first: bool) -> Outcome:
    """Answer `messages` without and with the cache, in either order, so that neither always finds the machine warm."""
    runs = {}
    for way in ("plain", "cached") if plain_first else ("cached", "plain"):
        given = {"cache": cache} if way == "cached" else {}
        runs[way] = answer(model, tokenizer, messages, options.max_new_tokens, **given)
    (plain, plain_first_token), (cached, cached_first_token) = runs["plain"], runs["cached"]
    reference = plain_first_token.log_probs
    kl = torch.sum(reference.exp() * (reference - cached_first_token.log_probs)).item()
    seconds = plain_first_token.seconds, cached_first_token.seconds
    return Outcome(plain, cached, *seconds, max(kl, 0.0), cache.last_report)


def play(scenario, model, tokenizer, cache, options, console) -> list[Outcome]:
    """Run one scenario, show every request, and return the outcomes of those after the ones that fill the store."""
    console.print(f"\n[bold]({scenario.letter}) {scenario.title}[/bold]")
    outcomes, requests, reply = [], scenario.requests(), None
    while True:
        try:
            request = requests.send(reply)
        except StopIteration:
            return outcomes
        if request.fills_store:
            reply, first = answer(model, tokenizer, request.messages, options.max_new_tokens, cache=cache)
            stored = f"{cache.last_report.prompt_tokens:,} tokens stored, first token after {first.seconds:.2f} s"
            console.print(f"\n  [dim]{request.title} ({stored})[/dim]")
            continue
        outcome = both_ways(model, tokenizer, cache, request.messages, options, plain_first=len(outcomes) % 2 == 0)
        outcomes.append(outcome)
        show(request.title, outcome, console)
        reply = outcome.cached


def show(title: str, outcome: Outcome, console: Console) -> None:
    report = outcome.report
    console.print(f"\n  [bold]{title}[/bold]")
    strip = report.strip(width=max(console.width - 4, 32), color=console.is_terminal)
    for line in strip.splitlines():
        console.print(Text("  ") + Text.from_ansi(line), no_wrap=True, overflow="ellipsis")
    saving = f"{outcome.cached_seconds:.2f} s instead of {outcome.plain_seconds:.2f} s"
    rows = f"{report.computed_rows:,} of {report.prompt_tokens:,} rows run ({outcome.share:.0%})"
    console.print(f"  first token after {saving}; {rows}; KL {outcome.kl:.4f}")
    if report.reason:
        console.print(Text(f"  {report.reason}"))
    for label, text, style in (("with cache", outcome.cached, "green"), ("without", outcome.plain, "cyan")):
        line = Text(f"{label:<10}  ", style=style) + Text(" ".join(text.split()))
        console.print(Padding(line, (0, 2), expand=False))


def failures(results, options: Options) -> list[str]:
    """Why the demo must not pass, one sentence each; empty if it may."""
    found = []
    for scenario, outcomes in results:
        worst = max(outcome.kl for outcome in outcomes)
        if not worst <= options.max_kl:
            found.append(f"({scenario.letter}): an answer's first token moved by KL {worst:.3f} > {options.max_kl}")
        rows = max(outcome.share for outcome in outcomes)
        if scenario.letter == "a" and rows > options.max_rows:
            found.append(f"(a): a request ran {rows:.0%} of its rows > {options.max_rows:.0%}")
        ratio = statistics.median(outcome.ratio for outcome in outcomes)
        if ratio >= 1:
            found.append(f"({scenario.letter}): no time saved, first tokens took {ratio:.2f} times as long")
    return found


def summary(results) -> Table:
    table = Table(title="\nTime to first token, medians over each scenario's requests", title_style="bold")
    for heading in ("scenario", "requests", "without", "with cache", "ratio", "rows run", "worst KL"):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for scenario, outcomes in results:
        rows = sum(o.report.computed_rows for o in outcomes) / sum(o.report.prompt_tokens for o in outcomes)
        table.add_row(
            f"({scenario.letter}) {scenario.title}",
            str(len(outcomes)),
            f"{statistics.median(o.plain_seconds for o in outcomes):.2f} s",
            f"{statistics.median(o.cached_seconds for o in outcomes):.2f} s",
            f"{statistics.median(o.ratio for o in outcomes):.2f}",
            f"{rows:.0%}",
            f"{max(o.kl for o in outcomes):.4f}",
        )
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="SuffixCache on SmolLM2-135M-Instruct: four jobs, with and without.")
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    options = Options(**vars(parser.parse_args(argv)))
    scenarios = [scenario for scenario in SCENARIOS if scenario.letter in options.only]
    if not scenarios:
        parser.error(f"--only must name some of {''.join(s.letter for s in SCENARIOS)}, got {options.only!r}")

    console = Console(highlight=False)
    console.width = min(console.width, 120) if console.is_terminal else 110
    transformers.logging.disable_progress_bar()
    model, tokenizer = load(options.threads or None)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    console.print(f"{versions}, {torch.get_num_threads()} threads\n{options}")
    answer(model, tokenizer, [{"role": "user", "content": "Good morning."}], 4)  # warms up torch, touches no cache

    cache = SuffixCache(fidelity=options.fidelity)
    results = [(scenario, play(scenario, model, tokenizer, cache, options, console)) for scenario in scenarios]
    console.print(summary(results))
    console.print(str(cache.stats), highlight=False)
    found = failures(results, options)
    for reason in found:
        console.print(Text(f"FAILED {reason}", style="bold red"))
    if not found:
        console.print(Text("All answers within bounds, and time was saved in every scenario.", style="bold green"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
