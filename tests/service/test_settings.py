"""file < environment < flags, and one clear line for everything that does not fit."""

import argparse
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from baton.options import option
from baton.service.settings import SettingsError, add_flags, given, load_settings, make_settings, to_argv


@dataclass(frozen=True)
class Example:
    model: Path = option("a folder")
    listen: str = option("an address", "127.0.0.1:0")
    block_size: int = option("tokens", 32)
    num_blocks: int | None = option("blocks", None)
    share: float = option("a share", 0.5)
    strict: bool = option("be strict", True)
    transports: tuple[str, ...] = option("in order", ("shm", "tcp"), choices=("shm", "tcp"))

    def __post_init__(self):
        if self.block_size < 1:
            raise ValueError("--block-size must be at least 1")


def load(argv=(), env=None, file=None, defaults=None) -> Example:
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    return load_settings(Example, parser.parse_args(list(argv)), env or {}, file, defaults)


def write(folder, text) -> Path:
    path = folder / "settings.toml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path):
    file = write(tmp_path, 'model = "m"\nblock_size = 1\nnum_blocks = 1\nshare = 1\nstrict = false\n')
    env = {"BATON_BLOCK_SIZE": "2", "BATON_NUM_BLOCKS": "2", "BATON_SHARE": "0.25"}
    settings = load(["--block-size", "3"], env, file, {"listen": "role:1", "num_blocks": 9})
    assert settings == Example(Path("m"), "role:1", 3, 2, 0.25, False, ("shm", "tcp"))
    with pytest.raises(FrozenInstanceError):
        settings.block_size = 4


def test_flags_of_every_kind():
    settings = load(["--model", "m", "--no-strict", "--transports", "tcp, shm", "--num-blocks=7"])
    assert settings == Example(Path("m"), num_blocks=7, strict=False, transports=("tcp", "shm"))
    assert load(["--model=m", "--strict"], {"BATON_STRICT": "off"}).strict


@pytest.mark.parametrize(
    "argv, env, toml, words",
    [
        ([], {}, "", ["--model"]),
        (["--model=m", "--block-size=many"], {}, "", ["--block-size", "many"]),
        (["--model=m", "--transports=udp"], {}, "", ["--transports", "udp", "shm"]),
        (["--model=m", "--block-size=0"], {}, "", ["--block-size"]),
        (["--model=m"], {"BATON_BLOKC_SIZE": "1"}, "", ["BATON_BLOKC_SIZE", "BATON_BLOCK_SIZE"]),
        (["--model=m"], {"BATON_STRICT": "perhaps"}, "", ["BATON_STRICT", "perhaps"]),
        (["--model=m"], {}, "block_sise = 4", ["block_sise", "block_size", "settings.toml"]),
        (["--model=m"], {}, "zzz = 4", ["zzz", "transports"]),
        (["--model=m"], {}, "block_size = 1.5", ["block_size", "1.5"]),
        (["--model=m"], {}, "model = [1]\n", ["model"]),
        (["--model=m"], {}, "listen = ['a:1']", ["listen", "['a:1'] is not a text"]),
        (["--model=m"], {}, "listen = {a = 1}", ["listen", "{'a': 1} is not a text"]),
        (["--model=m"], {}, "transports = [['shm']]", ["transports", "['shm'] is not a text"]),
        (["--model=m"], {}, "= 4", ["settings.toml", "TOML"]),
        (["--model=m"], {}, "block_size = 8\nblock-size = 16", ["settings.toml: block-size", "given twice"]),
        (["--model="], {}, "", ["--model is empty; leave it out"]),
        (["--model=m", "--listen="], {}, "", ["--listen is empty; leave it out"]),
        (["--model=m"], {}, "listen = ''", ["settings.toml: listen is empty; leave it out"]),
    ],
)
def test_refused_in_one_line(tmp_path, argv, env, toml, words):
    with pytest.raises(SettingsError) as raised:
        load(argv, env, write(tmp_path, toml))
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_an_empty_variable_is_not_set(tmp_path):
    names = ("MODEL", "LISTEN", "BLOCK_SIZE", "NUM_BLOCKS", "STRICT", "TRANSPORTS")
    env = {f"BATON_{name}": "" for name in names}
    assert load([], env, write(tmp_path, 'model = "m"\nnum_blocks = 7\n')) == Example(Path("m"), num_blocks=7)
    with pytest.raises(SettingsError, match="^--model is missing$"):
        load([], env)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match="none.toml"):
        load(["--model=m"], {}, tmp_path / "none.toml")


def test_environment_of_other_roles_is_not_ours():
    assert load(["--model=m"], {"BATON_REDIS": "redis://x", "PATH": "/"}).block_size == 32


def test_prefixed_flags_and_back():
    parser = argparse.ArgumentParser()
    for prefix in ("", "prefill.", "decode."):
        add_flags(parser, Example, prefix)
    args = parser.parse_args(["--block-size=4", "--prefill.block-size=8", "--no-decode.strict"])
    assert given(Example, args) == {"block_size": 4}
    assert given(Example, args, "prefill.") == {"block_size": 8}
    assert given(Example, args, "decode.") == {"strict": False}


def test_to_argv_says_the_same():
    settings = Example(Path("a b"), "h:1", 4, None, 0.1, False, ("tcp",))
    argv = to_argv(Example, vars(settings))
    assert load(argv) == settings


def test_what_is_auto_is_so_for_a_process_with_a_variable_too():
    parser = argparse.ArgumentParser()
    add_flags(parser, Example)
    argv = to_argv(Example, given(Example, parser.parse_args(["--model=m", "--num-blocks=auto"])))
    assert argv == ["--model=m", "--num-blocks=auto"] and load(argv, {"BATON_NUM_BLOCKS": "7"}).num_blocks is None
    assert to_argv(Example, {"listen": None}) == []


@dataclass(frozen=True)
class Part:
    num_blocks: int = option("blocks", 4)
    block_size: int = option("tokens", 32)

    def __post_init__(self):
        if self.num_blocks * self.block_size < 64:
            raise ValueError(f"num_blocks {self.num_blocks}: must hold 64 tokens; give more, or a larger block_size")


@dataclass(frozen=True)
class Whole:
    part: Part
    listen: str = option("an address", "127.0.0.1:0")


def test_fields_of_a_nested_class_are_flags_and_variables_like_any_other(tmp_path):
    parser = argparse.ArgumentParser()
    add_flags(parser, Whole)
    args = parser.parse_args(["--num-blocks=3"])
    file = write(tmp_path, "block_size = 64\nnum_blocks = 9\n")
    assert load_settings(Whole, args, {"BATON_LISTEN": "a:1"}, file) == Whole(Part(3, 64), "a:1")
    assert given(Whole, args) == {"num_blocks": 3}
    assert to_argv(Whole, {"block_size": 8, "listen": "a:1"}) == ["--block-size=8", "--listen=a:1"]


def test_what_a_nested_class_says_of_its_fields_is_said_of_flags():
    with pytest.raises(
        SettingsError, match="^--num-blocks 1: must hold 64 tokens; give more, or a larger --block-size$"
    ):
        load_settings(Whole, {"num_blocks": "1"}, {})


def test_a_field_that_no_class_has_is_refused():
    with pytest.raises(TypeError, match="no_such"):
        make_settings(Whole, {"no_such": 1})
