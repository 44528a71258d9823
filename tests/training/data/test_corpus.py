"""The corpus keeps held-out modules, and what tests them, away from training."""

import pytest

from baton.training.data.corpus import HELD_OUT, gather


def write(root, path, text="x = 1\n"):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def stdlib(tmp_path):
    for path in (
        "abc.py",
        "json/decoder.py",
        "json/encoder.py",
        "csv.py",
        "test/test_abc.py",
        "test/test_csv.py",
        "test/test_json/test_decode.py",
        "test/test_heapq_more.py",
        "unittest/test/test_case.py",
        "encodings/cp037.py",
        "site-packages/six.py",
    ):
        write(tmp_path, path)
    write(tmp_path, "test/bad_coding.py", b"\xff\xfe\n")
    return tmp_path


def paths(documents):
    return [document.path for document in documents]


def test_lists_are_sorted_and_apart(stdlib):
    corpus = gather(stdlib)
    assert paths(corpus.library) == ["abc.py", "json/encoder.py"]
    assert paths(corpus.held_out) == ["csv.py", "json/decoder.py"]
    assert paths(corpus.tests) == ["test/test_abc.py", "unittest/test/test_case.py"]


def test_manifest_follows_the_text(stdlib):
    before = gather(stdlib).manifest()
    assert before == gather(stdlib).manifest()
    assert before["library"]["num_files"] == 2 and before["library"]["num_bytes"] == 12
    write(stdlib, "abc.py", "x = 2\n")
    after = gather(stdlib).manifest()
    assert after["library"]["sha256"] != before["library"]["sha256"]
    assert after["tests"] == before["tests"]


def test_a_bound_cuts_each_list(stdlib):
    corpus = gather(stdlib, max_bytes=6)
    assert [len(documents) for documents in (corpus.library, corpus.tests, corpus.held_out)] == [1, 1, 1]


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no standard library source below"):
        gather(tmp_path)


def test_every_held_out_module_exists_here():
    corpus = gather()
    assert paths(corpus.held_out) == sorted(HELD_OUT)
    assert not set(paths(corpus.library)) & set(HELD_OUT)
