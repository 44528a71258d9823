"""The folders of the repository, a line each, for docs/architecture.md: `python -m tests.support.folder_map`."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "baton", "baton/client", "kvtransfer", "gateway", "baton/service", "baton/engine", "baton/worker", "prefill_worker", "decode_worker",
    "baton/training", "baton/quantization", "baton/loadgen", "baton/planning", "baton/cli",
)  # fmt: skip


def folder_map(root: Path) -> str:
    """Each room, its folders below it, and what their `__init__` says first."""
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
