"""
Benchmarks of the package: one module a question, one CSV schema for all, one separate plotter.

Run them from the root of the checkout, e.g. `python -m benchmarks.reorder --n 4`. Each prints its configuration
first, shows progress, and puts its rows into `benchmarks/results/<benchmark>.csv` (a rerun replaces them);
`python -m benchmarks.plot` draws what is there.

| module | question |
|---|---|
| `reorder` | passages in a new order behind a changed head: how close is the answer, how many rows run, how soon |
| `fidelity` | how far are answers from full prefill, by policy, source and setting; does `max_kl` hold |
| `nothing_in_common` | what does the cache cost a prompt that it can't help |
| `chat` | does a turn cost what its new text costs, and is that never slower than deep-copying a cache |
| `flips` | do exact hits change what is generated, in fp32 and in bf16, and how often does stock itself |
| `identity` | what does a look at the model's identity cost a call |
| `first_use` | what does measuring a model cost at its first use |
| `gpu_check` | does all that is made for GPUs give the right answers on one, how fast (`scripts/gpu_check.sh`) |
| `soak` | does a store stay right, small and fast under hours of mixed work (`python -m scripts.soak`) |
| `leaks` | what does a stored row reveal of the text before it, and is anything served or paid across scopes |
| `topics` | does a session notice that its user has left the topic, and what does that do to answers and reuse |
| `eviction` | what do the policies save where the text is larger than the store |
| `persistence` | how soon does a store on disk open, what does a restart keep, what do crashes and damaged files do |
| `oracles` | the figures of the oracles O1 to O7 and O9 (DESIGN.md, section 4) |
"""
