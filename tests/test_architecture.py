"""The rules of docs/architecture.md, read from the source with ast: nothing here imports what it judges."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pellucid"

BASE = {"errors", "version", "registry", "rope_scaling", "model_config", "config_tables", "config_text", "config"}
"""Layer 0: every room may import these, and they import nothing but each other."""

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "registry": {"errors"},
    "rope_scaling": {"errors", "registry"},
    "model_config": {"errors", "registry", "rope_scaling"},
    "config_tables": {"errors", "registry", "model_config"},
    "config_text": {"errors", "registry", "model_config", "config_tables"},
    "config": {"errors", "registry", "model_config", "config_tables", "config_text"},
    "serve_config": {"errors", "config"},
    "tokenizer": BASE,
    "kernels": set(),
    "model": BASE | {"kernels"},
    "optim": BASE,
    "parallel": BASE,
    "data": BASE | {"tokenizer"},
    "checkpoint": BASE | {"parallel", "model", "tokenizer"},
    "inference": BASE | {"kernels", "model"},
    "text": BASE | {"tokenizer", "model", "checkpoint", "inference"},
    "text_constraints": BASE | {"tokenizer", "inference"},
    "evaluate": BASE | {"tokenizer", "model", "optim", "parallel", "data", "checkpoint", "inference", "text"},
    "train": BASE | {"tokenizer", "model", "optim", "parallel", "data", "checkpoint"},
    "report": BASE,
    "conformance": {"errors"},
    "server": BASE | {"serve_config", "tokenizer", "inference", "text", "text_constraints"},
    "verify": BASE
    | {"tokenizer", "model", "optim", "parallel", "data", "checkpoint", "inference", "train", "evaluate"},
}
"""What each room may import, besides itself. `cli` and the package's own __init__ may import everything."""

MODULE_EXTRA = {"train.rollout": {"inference"}}
"""Exceptions that the architecture grants to one module."""

COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "scatter", "scatter_object_list", "barrier", "monitored_barrier", "send", "recv", "isend", "irecv",
    "batch_isend_irecv", "all_reduce_coalesced", "all_gather_coalesced",
}  # fmt: skip
COLLECTIVE_MODULES = {"parallel.comm"}
"""Modules that may issue a collective; adapters of torch's own engines join this set by name when they come."""

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

PARSERS = {"json.loads", "json.load", "tomllib.loads", "tomllib.load"}
PARSE_ERRORS = {"ValueError", "JSONDecodeError", "TOMLDecodeError"}


def module_name(path: Path) -> str:
    """ "data.shards" for pellucid/data/shards.py, "data" for pellucid/data/__init__.py, "" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in SOURCES.items()}


def room(module: str) -> str:
    return module.partition(".")[0]


def inner_imports(module: str, tree: ast.AST, known: set[str] | None = None) -> list[tuple[str, int]]:
    """The pellucid modules (without the prefix) that a tree imports anywhere in it, with the line."""
    known = set(SOURCES) if known is None else known
    found: list[tuple[str, int]] = []
    is_package = SOURCES.get(module, Path("x.py")).name == "__init__.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "pellucid" or alias.name.startswith("pellucid."):
                    found.append((alias.name.partition(".")[2], node.lineno))
        elif isinstance(node, ast.ImportFrom):
            target = node.module or ""
            if node.level:
                parent = ["pellucid", *filter(None, module.split("."))]
                parent = parent[: len(parent) - node.level + int(is_package)]
                target = ".".join([*parent, *filter(None, [target])])
            if target == "pellucid" or target.startswith("pellucid."):
                base = target.partition(".")[2]
                for alias in node.names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    found.append((inner if inner in known else base, node.lineno))
    return found


def layering_faults(module: str, tree: ast.AST, known: set[str] | None = None) -> list[str]:
    if room(module) in ("", "cli", "__main__"):
        return []
    if room(module) not in ALLOWED:
        return [f"pellucid.{module}: the architecture has no room {room(module)!r}"]
    allowed = ALLOWED[room(module)] | {room(module)} | MODULE_EXTRA.get(module, set())
    return [
        f"pellucid.{module}:{line} imports pellucid.{target}; {room(module)} may import {', '.join(sorted(allowed))}"
        for target, line in inner_imports(module, tree, known)
        # `import pellucid` alone would load every public name from below, a cycle in disguise
        if room(target) not in allowed
    ]


def collective_faults(module: str, tree: ast.AST) -> list[str]:
    if module in COLLECTIVE_MODULES:
        return []
    # names under which torch.distributed, or something from inside it, is reachable in this module
    aliases: set[str] = set()
    direct: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.distributed") and alias.asname:
                    aliases.add(alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            for alias in node.names:
                if node.module == "torch" and alias.name == "distributed":
                    aliases.add(alias.asname or "distributed")
                elif node.module.startswith("torch.distributed") and alias.name in COLLECTIVES:
                    direct[alias.name] = node.lineno
    faults = [f"pellucid.{module}:{line} imports the collective {name}" for name, line in direct.items()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if owner in aliases or owner.startswith("torch.distributed") or "distributed" in owner.split("."):
                faults.append(f"pellucid.{module}:{node.lineno} calls {owner}.{node.attr}; only parallel/comm.py may")
    return faults


def pickle_faults(module: str, tree: ast.AST) -> list[str]:
    faults = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            faults += [f"pellucid.{module}:{line} imports {name}" for name in imported if room(name) in PICKLES]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called in ("torch.load", "torch.save") and keywords.get("weights_only") != "True":
                faults.append(f"pellucid.{module}:{line} calls {called}, which pickles; use safetensors and JSON")
            if keywords.get("allow_pickle") == "True":
                faults.append(f"pellucid.{module}:{line} allows a pickle inside an array file")
    return faults


def parse_faults(module: str, tree: ast.AST) -> list[str]:
    """Parses of JSON or TOML whose handlers know a bad text, and not one that is nested too deeply."""
    faults = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        called = {ast.unparse(part.func) for line in node.body for part in ast.walk(line) if isinstance(part, ast.Call)}
        caught = {
            part.rpartition(".")[2]
            for handler in node.handlers
            if handler.type is not None
            for part in ast.unparse(handler.type).strip("()").split(", ")
        }
        if called & PARSERS and caught & PARSE_ERRORS and not caught & {"RecursionError", "Exception"}:
            faults.append(
                f"pellucid.{module}:{node.lineno} parses, and lets a RecursionError of a deeply nested text pass"
            )
    return faults


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """A cycle as [a, b, a], or nothing. Iterative, so that a long chain cannot exhaust the stack."""
    done: set[str] = set()
    for start in graph:
        path: list[str] = []
        stack: list[tuple[str, bool]] = [(start, False)]
        while stack:
            node, leaving = stack.pop()
            if leaving:
                done.add(path.pop())
            elif node in path:
                return [*path[path.index(node) :], node]
            elif node not in done:
                path.append(node)
                stack.append((node, True))
                stack += [(target, False) for target in sorted(graph.get(node, set()))]
    return []


def runs_at_import(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and without `if TYPE_CHECKING:`, whose imports do not run at import."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    copy = ast.parse(ast.unparse(tree))
    return Strip().visit(copy)


@pytest.mark.parametrize("module", SOURCES)
def test_a_room_imports_only_what_lies_below_it(module: str) -> None:
    assert layering_faults(module, TREES[module]) == []


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, tree in TREES.items():
        targets = {target for target, _ in inner_imports(module, runs_at_import(tree))}
        graph[module] = targets - {"", module}  # the package's own names are looked up lazily
    assert import_cycle(graph) == []


@pytest.mark.parametrize("module", SOURCES)
def test_only_comm_issues_collectives(module: str) -> None:
    assert collective_faults(module, TREES[module]) == []


@pytest.mark.parametrize("module", SOURCES)
def test_nothing_is_unpickled(module: str) -> None:
    assert pickle_faults(module, TREES[module]) == []


@pytest.mark.parametrize("module", SOURCES)
def test_a_parse_that_may_fail_may_fail_on_nesting_too(module: str) -> None:
    assert parse_faults(module, TREES[module]) == []


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "misc", "common"}
    assert [name for name in SOURCES if drawers & set(name.split("."))] == []


def test_every_module_says_what_it_is_for() -> None:
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_import_pellucid_is_light() -> None:
    heavy = [
        "torch", "numpy", "tokenizers", "tiktoken", "transformers", "h5py", "pyarrow", "zstandard", "jinja2", "rich",
        "fastapi", "starlette", "uvicorn", "multiprocessing",
    ]  # fmt: skip
    script = f"import sys, pellucid; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_rooms_and_the_command_line_load_no_optional_package() -> None:
    rooms = sorted({room(module) for module in SOURCES} - {"", "__main__", "server"})
    optional = [
        "transformers", "h5py", "pyarrow", "zstandard", "gguf", "llguidance", "fastapi", "starlette", "uvicorn", "hypothesis",
    ]  # fmt: skip
    script = (
        f"import importlib, sys\nfor room in {rooms!r}: importlib.import_module('pellucid.' + room)\n"
        f"print([m for m in {optional!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_sizes_are_reported() -> None:
    """Not a law: modules of more than 300 lines are listed for whoever reviews (`pytest -rP` shows them)."""
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in SOURCES.items()}
    for name, lines in sorted(sizes.items(), key=lambda item: -item[1]):
        if lines > 300:
            print(f"pellucid.{name}: {lines} lines")
    assert sizes, "no module was found at all"


# -- the checks themselves: a check that finds nothing in a bad module would pass for ever -------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("model.attention", "from pellucid.train.losses import x"),
        ("model.attention", "def f():\n    import pellucid.data.shards"),
        ("model.attention", "from ..data import shards"),
        ("tokenizer.bpe", "from pellucid import checkpoint"),
        ("train.loop", "from pellucid.inference.generate import generate"),
        ("train.loop", "from pellucid import load_model"),
        ("report.report", "from pellucid.train import loop"),
        ("errors", "from pellucid.config import RunConfig"),
        ("model_config", "from pellucid.config import RunConfig"),
        ("kitchen.sink", "x = 1"),
    ],
)
def test_the_layering_check_sees_a_wrong_import(module: str, source: str) -> None:
    known = {"checkpoint", "data.shards", "train.loop", "train.losses", "inference.generate", "config"}
    assert layering_faults(module, ast.parse(source), known)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("train.rollout", "from pellucid.inference.generate import generate"),
        ("data.shards", "from pellucid.tokenizer import Tokenizer"),
        ("data.shards", "from pellucid.data.batches import Batch"),
        ("cli.train", "from pellucid.train.loop import Trainer"),
        ("config", "from pellucid.registry import lookup"),
    ],
)
def test_the_layering_check_lets_right_imports_pass(module: str, source: str) -> None:
    assert layering_faults(module, ast.parse(source), {"tokenizer", "data.batches", "train.loop"}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.distributed.all_reduce(x)",
        "import torch.distributed as dist\ndef f():\n    dist.broadcast(x, 0)",
        "from torch import distributed\ndistributed.barrier()",
        "from torch import distributed as d\nd.all_to_all_single(a, b)",
        "from torch.distributed import all_gather",
    ],
)
def test_the_collective_check_sees_each_spelling(source: str) -> None:
    assert collective_faults("train.loop", ast.parse(source))
    assert collective_faults("parallel.comm", ast.parse(source)) == []


def test_the_collective_check_leaves_other_methods_of_that_name_alone() -> None:
    assert (
        collective_faults(
            "train.loop", ast.parse("x = state.gather(1)\nsocket.send(b'')\ncomm.all_reduce(x, tag='tokens')")
        )
        == []
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_pickle_check_sees_each_spelling(source: str) -> None:
    assert pickle_faults("train.loop", ast.parse(source))


@pytest.mark.parametrize(
    ("handler", "bad"),
    [
        ("ValueError", True),
        ("(OSError, json.JSONDecodeError)", True),
        ("tomllib.TOMLDecodeError", True),
        ("(ValueError, RecursionError)", False),
        ("OSError", False),
        ("Exception", False),
    ],
)
def test_the_parse_check_sees_each_spelling(handler: str, bad: bool) -> None:
    source = f"try:\n    x = dict(json.loads(text))\nexcept {handler}:\n    pass\n"
    assert bool(parse_faults("data.index", ast.parse(source))) == bad
    assert not parse_faults("data.index", ast.parse(source + "except RecursionError:\n    pass"))


def test_the_cycle_check_finds_a_cycle_and_only_a_cycle() -> None:
    assert import_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert import_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_command_loads_the_compiler_that_it_does_not_use() -> None:
    loaded = "import sys, pellucid.checkpoint.gguf_import, pellucid.train, pellucid.text; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
