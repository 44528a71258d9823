"""A fact is declared once: how many files written by hand name an example of each kind of fact.

Counted are the code of the product and the protos, comments and docstrings of Python files aside. Not counted: tests,
benches, examples, docs, deploy/, and what is generated.
"""

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

from tests.support.process import ROOT

ROOMS = ("baton", "gateway", "kvtransfer", "prefill_worker", "decode_worker", "protos")
CODE = (".py", ".proto", ".cpp", ".h")
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def names_of(path: Path) -> set[str]:
    """Return the words of a file that are code, and those strings that are one word."""
    text = path.read_text()
    if path.suffix != ".py":
        return set(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {
        token.string.strip("\"'") for token in tokens if token.type in (tokenize.NAME, tokenize.STRING)
    }  # fmt: skip


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    files = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [name for name in files.stdout.split() if name.endswith(CODE) and not name.endswith(GENERATED)]
    assert len(found) > 300
    return {name: names_of(ROOT / name) for name in found if (ROOT / name).exists()}


OF_WEIGHTS = ("baton/engine/weights/", "baton/engine/layers/linear/", "baton/engine/kernels/linear.py")  # int4 ones


# A new one touches no more files than one that is there.
@pytest.mark.parametrize(
    ("words", "most"),
    [
        # A sampling parameter: the record, a field of two messages, what draws by it, and the client's keyword. A
        # filter is arithmetic of its own, in torch, in Triton and in C++.
        (("min_p",), 6),
        (("presence_penalty",), 5),
        # A form of KV: its declaration, and C++. One with arithmetic of its own has that in torch and in Triton too.
        (("fp8_e5m2", "FORM_E5M2"), 3),
        (("int4", "FORM_INT4"), 4),
        # A setting: its declaration, and who uses it; more where that is a class that takes it by the same name.
        (("kv_digest",), 2),
        (("strict_numerics",), 2),
        (("draft_model",), 2),
        (("lease_ttl_s",), 4),
        (("resume_window_s",), 4),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_files_that_name_it(names, words, most):
    naming = sorted(name for name, found in names.items() if found & set(words) and not name.startswith(OF_WEIGHTS))
    assert 1 <= len(naming) <= most, naming
