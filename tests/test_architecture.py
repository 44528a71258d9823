"""Imports point down and never sideways, no circle among files or folders, both small, no code in data."""

import ast
import gc
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.process import ROOT
from tests.support.source_tree import module_name, sources

MAX_LINES = 400
MAX_FILES = 12  # of a folder, `__init__` and `__main__` aside

_ROLE = ("baton.worker", "baton.engine", "baton.failpoints", "kvtransfer", "baton.service", "baton.v1")
# room -> what it may import from the repository. Rooms are matched longest prefix first.
ROOMS = {
    "baton.v1": (),
    "baton.client": ("baton.v1",),
    "baton.model_files": (),
    "baton.gguf": ("baton.model_files",),
    "baton.addresses": (),
    "baton.lines": (),
    "baton.options": (),
    "baton.failpoints": (),
    "baton.tasks": (),
    "baton.fairness": (),
    "baton.sampling_params": (),
    "baton.protocol": (),
    "baton.system": (),
    "baton.tokenizer": ("baton.gguf", "baton.lines"),
    "baton.constraints": ("baton.gguf", "baton.lines", "baton.system"),
    "kvtransfer": ("baton.v1", "baton.addresses", "baton.failpoints", "baton.tasks", "baton.system"),
    "baton.engine": (
        "kvtransfer.naming",
        "kvtransfer.layout",
        "baton.gguf",
        "baton.lines",
        "baton.model_files",
        "baton.options",
        "baton.failpoints",
        "baton.fairness",
        "baton.sampling_params",
        "baton.protocol",
        "baton.tokenizer",
        "baton.constraints",
        "baton.system",
    ),
    "baton.training": ("baton.engine", "baton.quantization"),
    "baton.quantization": ("baton.engine", "kvtransfer.layout"),
    "baton.service": (
        "baton.v1",
        "baton.addresses",
        "baton.options",
        "baton.tasks",
        "baton.fairness",
        "baton.protocol",
        "baton.system",
    ),
    "baton.loadgen": ("baton.service", "baton.client", "baton.v1"),
    "baton.planning": (
        "baton.engine",
        "baton.lines",
        "baton.loadgen",
        "baton.protocol",
        "baton.sampling_params",
        "baton.service",
        "baton.system",
        "baton.tasks",
        "baton.v1",
        "gateway.queue",
        "gateway.routing",
        "gateway.store",
        "kvtransfer.layout",
        "kvtransfer.naming",
    ),
    "gateway": (
        "baton.service",
        "baton.v1",
        "baton.addresses",
        "baton.gguf",
        "baton.lines",
        "baton.model_files",
        "baton.options",
        "baton.failpoints",
        "baton.tasks",
        "baton.fairness",
        "baton.sampling_params",
        "baton.protocol",
        "baton.tokenizer",
        "baton.constraints",
        "kvtransfer.capabilities",
        "kvtransfer.naming",
    ),
    "baton.worker": (
        "baton.engine",
        "baton.addresses",
        "baton.gguf",
        "baton.lines",
        "baton.model_files",
        "baton.options",
        "baton.failpoints",
        "baton.tasks",
        "baton.sampling_params",
        "baton.protocol",
        "baton.constraints",
        "baton.system",
        "kvtransfer",
        "baton.service",
        "baton.v1",
    ),
    **dict.fromkeys(("prefill_worker", "decode_worker"), _ROLE),
    "baton.cli": ("baton", "kvtransfer", "gateway", "prefill_worker", "decode_worker"),
}
# room -> third-party packages that it does without.
WITHOUT = {
    "baton.client": ("torch", "numpy", "google.rpc", "redis", "opentelemetry"),
    "kvtransfer": ("redis", "opentelemetry", "torch"),
    "baton.tokenizer": ("torch", "transformers", "grpc", "google.protobuf", "redis", "opentelemetry"),
    "baton.constraints": ("torch", "transformers", "grpc", "google.protobuf", "redis", "opentelemetry"),
    "baton.engine": ("grpc", "google.protobuf", "redis", "opentelemetry"),
    "baton.training": ("grpc", "google.protobuf", "redis", "opentelemetry", "transformers"),
    "baton.quantization": ("grpc", "google.protobuf", "redis", "opentelemetry", "transformers"),
    "baton.service": ("torch", "redis", "transformers"),
    "gateway": ("torch", "transformers"),
    "baton.loadgen": ("torch", "transformers", "redis", "opentelemetry"),
    "baton.planning": ("redis", "opentelemetry", "transformers"),
    "baton.worker": ("redis",),
    "prefill_worker": ("redis",),
    "decode_worker": ("redis",),
}
# Standard library only.
PLAIN = (
    "kvtransfer.capabilities",
    "kvtransfer.naming",
    "kvtransfer.layout",
    "baton.addresses",
    "baton.gguf",
    "baton.lines",
    "baton.model_files",
    "baton.options",
    "baton.failpoints",
    "baton.tasks",
    "baton.fairness",
    "baton.sampling_params",
    "baton.protocol",
    "baton.system",
)
NO_CODE_IN_DATA = ("pickle", "dill", "cloudpickle", "marshal", "shelve")

# room -> its folders, lowest first -> what each may import of its own room (".": the room's own files).
FOLDERS = {
    "kvtransfer": {
        ".": "",
        "memory": ".",
        "transports": ". memory",
        "transfer": ". memory transports",
    },
    "gateway": {
        "store": "",
        "model": "",
        "parsers": "",
        "config": "model parsers",
        "routing": "",
        "text": "",
        "prefix": "store text",
        "queue": "store routing",
        "link": "routing",
        "discovery": "store config link",
        "request": "model config routing text prefix queue link",
        "answer": "parsers text request",
        "fleet": "model config routing prefix link discovery",
        "attempts": "prefix routing link request answer fleet",
        "orchestration": "config routing text prefix queue link request answer fleet attempts",
        "pooling": "config routing queue link request fleet attempts orchestration",
        "catalog": "model parsers config text prefix queue request answer fleet orchestration pooling",
        "observe": "prefix request queue link fleet catalog",
        "api": "config prefix queue discovery text request answer fleet catalog observe",
        "http.wire": "",
        "http.fields": "request",
        "http.openai": "request http.wire http.fields",
        "http.responses": "request http.wire http.fields",
        "http.anthropic": "request http.wire http.fields",
        "http": "request api http.wire http.fields http.openai http.responses http.anthropic",
        ".": "store model config prefix queue request fleet observe orchestration catalog api http",
    },
    "baton.engine": {
        "native": "",
        "native.attention": "",
        "native.layers": "",
        "native.linear": "",
        "native.sampling": "",
        "native.linear.bytes32": "",
        "native.linear.bytes64": "",
        "speculation": "",
        "core": "native",
        "weights": "core",
        "kv": "",
        "families": "core",
        "families.dense": "core families",
        "families.mixture": "core families families.dense",
        "families.hybrid": "core families families.dense families.mixture",
        "kernels": "weights kv",
        "kernels.state": "kernels",
        "parallel": "native core kernels",
        "sampling": "kernels native core",
        "attention": "native core kv kernels",
        "layers.linear": "native weights kernels",
        "layers": "core parallel kernels layers.linear",
        "recurrent": "native core parallel weights kv kernels kernels.state attention layers.linear layers",
        "adapters": "core weights kernels layers.linear",
        "schedule": "core kv sampling adapters",
        "weights.formats": "weights core layers",
        "models": (
            "native weights core parallel families families.dense families.mixture families.hybrid kv kernels attention "
            "layers.linear layers recurrent weights.formats adapters"
        ),
        "ranks": "native core parallel kv models",
        "speculation.proposers": (
            "native weights core kv sampling attention layers.linear layers weights.formats models"
        ),
        "speculation.control": "core sampling schedule speculation.proposers",
        "execute": "native core parallel kv kernels sampling schedule models ranks speculation.proposers speculation.control",
        "gpu_ranks": "native core parallel kv sampling models ranks speculation.proposers execute",
        ".": "kernels core parallel kv sampling adapters schedule models ranks speculation.proposers speculation.control execute gpu_ranks",
    },
    "baton.service": {
        ".": "",
        "security": ".",
        "net": ". security",
        "observe": ". security net",
    },
    "baton.worker": {
        "wire": "",
        "legs": "wire",
        "kv": "wire legs",
        "session": "wire legs kv",
        "observe": "wire legs kv session",
        "ranks": "kv",
        ".": "wire legs kv session observe ranks",
    },
    "baton.training": {
        "data": "",
        "model": "data",
        "heads": "data model",
        ".": "data model heads",
    },
    "baton.quantization": {
        "core": "",
        "methods": "core",
        ".": "core methods",
    },
    "baton.planning": {
        ".": "",
        "scaling": ".",
    },
    "baton.cli": {
        ".": "",
        "client": "",
        "models": "",
        "launch.placing": "",
        "launch.cluster": "launch.placing",
        "launch": "launch.placing launch.cluster",
        "gpu": "",
        "gpu.steps": "launch gpu",
        "planning": "launch launch.placing",
        "cluster": "launch launch.placing gpu",
    },
}


def room_of(module: str) -> str | None:
    rooms = [room for room in ROOMS if module == room or module.startswith(room + ".")]
    return max(rooms, key=len) if rooms else None


def within(module: str, prefixes) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


@pytest.fixture(autouse=True, scope="module")
def trees_go():
    """A collection of garbage would look at them in every later test of this process, and while they grow again and
    again."""
    gc.disable()
    yield
    for cached in (nodes, imports, calls):
        cached.cache_clear()
    gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, which is parsed once for all rules."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    """Every imported module, function-local imports too; `from a import b` counts as a.b where that is a module."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names if is_module(f"{base}.{alias.name}"))
    return found


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


SOURCES = sources()
# C++ too.
FILES = [
    path.relative_to(ROOT)
    for top in ("baton", "kvtransfer", "gateway", "prefill_worker", "decode_worker")
    for path in (ROOT / top).rglob("*")
    if path.suffix in {".py", ".cpp", ".h"} and not path.stem.endswith(("_pb2", "_pb2_grpc"))
]


def test_imports_point_down():
    for module in sorted(SOURCES):
        check_imports(module)


def check_imports(module: str) -> None:
    room = room_of(module)
    if room is None:
        assert module == "baton", f"{module} is in no room"
        return
    for name in imports(SOURCES[module]):
        own = name == "baton" or name == room or name.startswith(room + ".")
        repository = name.split(".")[0] in {"baton", "kvtransfer", "gateway", "prefill_worker", "decode_worker"}
        if repository and not own:
            prefix_only = any(allowed.startswith(name + ".") for allowed in ROOMS[room])
            assert within(name, ROOMS[room]) or prefix_only, f"{module} ({room}) may not import {name}"
        assert not within(name, WITHOUT.get(room, ())), f"{module}: {room} does without {name}"
        assert not within(name, NO_CODE_IN_DATA), f"{module} imports {name}: no code in data"
        if module in PLAIN and repository:
            assert name in PLAIN or name == "kvtransfer", f"{module} is plain Python, imports {name}"


def test_no_import_circle():
    graph = {
        module: {name for name in imports(path) if name in SOURCES and name != module}
        for module, path in SOURCES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: list[str]):
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for name in sorted(graph[module]):
                if not module.startswith(name + "."):  # importing one's own package's __init__ is no circle
                    visit(name, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_a_file_owns_one_noun():
    num_lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in FILES}
    assert not {path: num for path, num in num_lines.items() if num > MAX_LINES}, f"at most {MAX_LINES} lines"


def test_a_family_is_small():
    """What a family adds is read from one file of at most 80 lines."""
    files = (ROOT / "baton/engine/families").glob("*/*.py")
    assert not [str(path) for path in files if len(path.read_text().splitlines()) > 80]


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_a_folder_has_few_files_and_says_what_they_are(folder):
    files = [path.name for path in FILES if path.parent == folder and not path.name.startswith("__")]
    assert len(files) <= MAX_FILES, f"{folder} has {len(files)} files, at most {MAX_FILES}: open a folder below"
    doc = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))
    assert doc, f"{folder}/__init__.py has no docstring"


@pytest.mark.parametrize("top", ["bench", "examples", "tests"])
def test_folders_that_are_not_installed_are_small_too(top):
    """But bench/ itself: each file there is a command, and what they share is in its folders."""
    files = [path for path in (ROOT / top).rglob("*.py") if not path.name.startswith("__")]
    widths = Counter(path.parent.relative_to(ROOT) for path in files)
    widths.pop(Path("bench"), None)
    assert not {str(folder): width for folder, width in widths.items() if width > MAX_FILES}


@pytest.mark.parametrize("room", FOLDERS)
def test_folders_of_a_room_import_what_their_row_says(room):
    rows = FOLDERS[room]
    for place, (folder, needs) in enumerate(rows.items()):
        below = list(rows)[:place]
        assert set(needs.split()) <= set(below), f"{room}: {folder} names a folder that is below it"
    for module, path in SOURCES.items():
        if not within(module, [room]):
            continue
        own = folder_in(room, module)
        assert own in rows, f"{room}: {own} has no row in FOLDERS"
        for name in imports(path):
            if name in SOURCES and within(name, [room]) and not is_package_of(name, module):
                other = folder_in(room, name)
                allowed = {own, *rows[own].split()}
                assert other in allowed, f"{module} may not import {name}: {own} of {room} has no {other}"


def folder_in(room: str, module: str) -> str:
    """The folder of a module below its room, "." for the room's own files."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    return package[len(room) + 1 :] or "."


def is_package_of(name: str, module: str) -> bool:
    return SOURCES[name].name == "__init__.py" and module.startswith(name + ".")


def test_no_test_imports_another_and_helpers_import_no_test():
    """What several use lies in tests/support, or in a helper of the folder: a module of tests is run as one."""
    wrong = []
    for top in ("tests", "bench"):
        for path in (ROOT / top).rglob("*.py"):
            helps = path.is_relative_to(ROOT / "tests" / "support")
            for name in imports(path):
                words = name.split(".")
                is_test = words[0] == "tests" and any(word.startswith("test_") for word in words)
                if is_test or (helps and words[0] == "tests" and words[1:2] not in ([], ["support"])):
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, wrong


def test_a_class_name_stands_once():
    found: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


@pytest.mark.parametrize("module", sorted(name for name in SOURCES if within(name, ["kvtransfer"])))
def test_importing_kvtransfer_runs_nothing(module):
    if SOURCES[module].name == "__init__.py":
        (doc,) = ast.parse(SOURCES[module].read_text()).body
        assert isinstance(doc, ast.Expr), f"{module} holds more than its docstring"


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call: where it stands, what is called, and the node."""
    return [
        (f"{module}:{node.lineno}", ast.unparse(node.func), node)
        for module, path in SOURCES.items()
        for node in nodes(path)
        if isinstance(node, ast.Call)
    ]


def test_no_unsafe_loading():
    """`torch.load`, `eval`, `exec` and `yaml.load` run code that is in data."""
    unsafe = {"torch.load", "eval", "exec", "yaml.load"}
    assert not [f"{where} calls {name}" for where, name, _ in calls() if name in unsafe]


def test_nothing_runs_between_fork_and_exec():
    """gRPC's threads live in most of our processes: a fork that runs Python there dies of SIGSEGV now and then."""
    assert not [where for where, name, _ in calls() if name == "os.fork"], "forks"
    told = [where for where, _, node in calls() if any(word.arg == "preexec_fn" for word in node.keywords)]
    assert not told, "have a preexec_fn"


def names_bound_by(path: Path) -> set[str]:
    """Every name that a file binds anywhere: a class, a function, an assignment, an import."""
    found = set()
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return found


def test_what_is_imported_by_name_exists():
    """Imports within functions too, of tests and benches that run seldom."""
    bound, missing = {}, []
    for top in ("baton", "kvtransfer", "gateway", "prefill_worker", "decode_worker", "tests", "bench", "examples"):
        for path in (ROOT / top).rglob("*.py"):
            for node in nodes(path):
                if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                    continue
                file = (ROOT / Path(*node.module.split("."))).with_suffix(".py")
                if not file.exists() or file.stem.endswith(("_pb2", "_pb2_grpc")):
                    continue
                if file not in bound:
                    bound[file] = names_bound_by(file)
                missing += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"
                    for alias in node.names
                    if alias.name not in bound[file]
                ]
    assert not missing, missing
