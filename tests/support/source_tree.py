"""What stands in the repository: its modules, and its folders, a line each, for docs/architecture.md:
`python -m tests.support.source_tree`."""

import ast
from pathlib import Path

from tests.support.process import ROOT

ROOMS = (
    "baton", "baton/client", "kvtransfer", "gateway", "baton/service", "baton/engine", "baton/worker", "prefill_worker", "decode_worker",
    "baton/training", "baton/quantization", "baton/loadgen", "baton/planning", "baton/cli",
)  # fmt: skip


def sources() -> dict[str, Path]:
    """Return every Python file of what is installed, by name of its module, but generated code."""
    tops = ("baton", "kvtransfer", "gateway", "prefill_worker", "decode_worker")
    paths = [
        path for top in tops for path in (ROOT / top).rglob("*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]
    return {module_name(path): path for path in paths}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_map(root: Path) -> str:
    """Return each room, its folders below it, and what their `__init__` says first."""
    lines = []
    for room in ROOMS:
        inits = sorted((root / room).rglob("__init__.py"), key=lambda path: path.parent.parts)
        for init in inits if room != "baton" else [root / "baton" / "__init__.py"]:
            depth = len(init.parent.relative_to(root / room).parts)
            name = f"{init.parent.relative_to(root) if not depth else init.parent.name}/"
            said = " ".join(ast.get_docstring(ast.parse(init.read_text())).split("\n\n")[0].split())
            lines.append(f"{'  ' * depth + name:<20} {said}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(folder_map(ROOT), end="")
