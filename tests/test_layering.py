"""Imports point one way (DESIGN.md, section 5). An edge that is not in the table fails."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_suffix_cache"

TIERS = [
    {"config"},
    {"building"},
    {"kernels", "rope", "masks", "regimes", "grouped", "flash"},
    {"store"},
    {"view", "planning", "repair", "capability", "identity", "attention", "report", "bound", "reach"},
    {"prompt", "measurement", "narrowing", "drift"},
    {"signals", "filtering", "escalation"},
    {"passes"},
    {"request"},
    {"learn", "generation"},
    {"cache"},
    {"__main__", "__init__"},
]
# Edges inside a tier, each with its reason.
SIDEWAYS = {
    ("reach", "attention"): "reach is read by a probe of the attention",
    ("__main__", "__init__"): "the command shows the version",
    ("report", "planning"): "a report shows Span",
    ("view", "capability"): "a view is laid out as the model was measured",
}
# Parts of a module that has been split, one noun a file: they belong to the module named here.
PART_OF = {
    "strip": "report",
    "prometheus": "report",
    "causes": "prompt",
    "near_misses": "prompt",
    "admission": "cache",
    "opening": "cache",
    "owned": "cache",
    "hints": "cache",
    "loading": "request",
    "events": "cache",
    "explaining": "cache",
    "inputs": "prompt",
    "capabilities": "measurement",
    "calls": "generation",
    "auditing": "cache",
    "calibrating": "cache",
    "comparison": "cache",
    "healing": "passes",
    "settling": "cache",
    "private": "cache",
    "registration": "cache",
    "diagnosis": "cache",
    "drafting": "request",
    "tracing": "cache",
    "forwards": "passes",
    "lookup": "kernels",
    "differences": "rope",
    "grouping": "passes",
}
FORBIDDEN = {("generation", "store"): "generation knows a store by its open_view method only"}
MAY_NAME_TRANSFORMERS = {"__main__", "cache", "view", "generation", "attention", "capability", "measurement", "learn"}
WITHOUT_TORCH = {"config", "planning", "repair", "report", "bound"}


def module_of(path: Path) -> str:
    """`store/pool.py` -> `store`, `cache.py` -> `cache`: the names of the tiers."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return PART_OF.get(first, first)


def imports_of(source: str, path: Path) -> set[str]:
    """Absolute dotted names of everything imported anywhere in `source`, also inside functions."""
    package = ["hf_suffix_cache", *path.relative_to(PACKAGE).parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def edges_of(source: str, path: Path) -> set[tuple[str, str]]:
    """Edges between the package's modules."""
    importer, edges = module_of(path), set()
    for name in imports_of(source, path):
        parts = name.split(".")
        if parts[0] == "hf_suffix_cache" and len(parts) > 1:
            target = PART_OF.get(parts[1], parts[1])
            edges.add((importer, target if tier(target) is not None else "__init__"))
    return {edge for edge in edges if edge[0] != edge[1]}


def tier(module: str) -> int | None:
    return next((number for number, modules in enumerate(TIERS) if module in modules), None)


def fault(edge: tuple[str, str]) -> str | None:
    """Why an edge is not allowed, or None."""
    importer, imported = edge
    if edge in FORBIDDEN:
        return FORBIDDEN[edge]
    if tier(importer) > tier(imported) or edge in SIDEWAYS:
        return None
    return f"{importer} may not import {imported}"


FILES = sorted(path for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    assert tier(module_of(path)) is not None, f"{path.name} has no place in the table"
    source = path.read_text()
    assert [found for found in map(fault, edges_of(source, path)) if found] == []
    roots = {name.split(".")[0] for name in imports_of(source, path)}
    if module_of(path) not in MAY_NAME_TRANSFORMERS:
        assert "transformers" not in roots
    if module_of(path) in WITHOUT_TORCH:
        assert "torch" not in roots


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_stay_small_and_names_of_old_transformers_stay_out(path):
    source = path.read_text()
    assert len(source.splitlines()) < 450
    for word in ("key_cache", "seen_tokens", "get_usable_length"):
        assert word not in source
    if path.name != "view.py":
        assert ".crop(" not in source and "def crop" not in source


def test_every_sideways_edge_is_used():
    used = set().union(*(edges_of(path.read_text(), path) for path in FILES))
    assert set(SIDEWAYS) <= used, f"not needed any more: {set(SIDEWAYS) - used}"


@pytest.mark.parametrize(
    "file, line, wrong",
    [
        ("planning.py", "from .cache import SuffixCache", True),
        ("planning.py", "def f():\n    from hf_suffix_cache.store.pool import BlockPool", False),
        ("store/pool.py", "from ..view import View", True),
        ("store/pool.py", "from .. import cache", True),
        ("store/pool.py", "from ..config import PoolExhausted", False),
        ("generation.py", "from .store.store import Store", True),
        ("view.py", "from . import SuffixCache", True),
        ("cache.py", "from .store.store import Store", False),
    ],
)
def test_control_the_reader_finds_wrong_edges(file, line, wrong):
    found = [fault(edge) for edge in edges_of(line, PACKAGE / file)]
    assert any(found) is wrong
