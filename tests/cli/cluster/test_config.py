"""`baton config`, and the file that `baton up --config` reads: file < variables < flags, and where a value was set."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from baton.cli.cluster.up_settings import add_up_flags, make_plan
from baton.cli.launch.placing.launcher import WorkerProgram
from baton.cli.launch.stack import StackPlan
from baton.cli.main import main
from baton.engine.core.config import EngineConfig
from baton.service.settings import SettingsError, add_flags, load_settings
from baton.worker.settings import WorkerSettings
from tests.support.security.installation import install


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path / "m"


def plan(*argv: str, file: str = "") -> StackPlan:
    Path("up.toml").write_text(file)
    parser = argparse.ArgumentParser()
    add_up_flags(parser, is_short=True)
    return make_plan(parser.parse_args(["--model", "m", "--config", "up.toml", *argv]))


def printed(capsys, *argv: str) -> str:
    assert main(["config", *argv]) == 0
    return capsys.readouterr().out


def line_of(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} =")]
    return line


def test_a_file_that_begins_with_a_byte_order_mark():
    """As Windows writes it."""
    assert plan(file="\ufeffdecode = 2").num_workers == {"prefill": 1, "decode": 2}


def test_a_file_says_what_flags_say(model):
    file = """
        decode = 2
        block-size = 16
        [prefill_worker]
        threads = 3
        [gateway]
        split = "never"
    """
    made = plan(file=file)
    assert made.num_workers == {"prefill": 1, "decode": 2}
    assert "--block-size=16" in made.worker_options["decode"] and "--threads=3" in made.worker_options["prefill"]
    assert "--split=never" in made.gateway_options


def test_a_name_reaches_every_process():
    made = plan("--served-model-name", "acme")
    for options in (*made.worker_options.values(), made.gateway_options):
        assert "--served-model-name=acme" in options
    assert not any("served-model-name" in option for option in plan().gateway_options), "the folder's"
    with pytest.raises(SettingsError, match="--served-model-name"):
        plan("--served-model-name", "two\nlines")


def test_variables_and_flags_win(monkeypatch):
    monkeypatch.setenv("BATON_BLOCK_SIZE", "64")  # the processes inherit it
    made = plan("--threads", "2", "--decode", "3", file="decode = 2\nblock_size = 16\n[prefill_worker]\nthreads = 5\n")
    assert made.num_workers["decode"] == 3
    assert not any(option.startswith("--block-size") for option in made.worker_options["prefill"])
    assert "--threads=2" in made.worker_options["prefill"]


def test_auto_wins_over_a_variable(model, monkeypatch):
    for name in ("THREADS", "NUM_BLOCKS"):
        monkeypatch.setenv(f"BATON_{name}", "2")
    parser = argparse.ArgumentParser()
    add_flags(parser, WorkerSettings)
    made = plan("--threads", "auto", "--decode.num-blocks", "auto")

    def engine(role: str) -> EngineConfig:
        options = WorkerProgram(model, made.worker_options).options_of(role, "127.0.0.1:0")
        return load_settings(WorkerSettings, parser.parse_args(options)).engine

    assert (engine("prefill").threads, engine("prefill").num_blocks) == (None, 2)
    assert (engine("decode").threads, engine("decode").num_blocks) == (None, None)


def test_an_empty_variable_leaves_the_file_in_force(monkeypatch, capsys):
    for name in ("REDIS", "BLOCK_SIZE", "STAND_IN"):
        monkeypatch.setenv(f"BATON_{name}", "")
    made = plan(file="redis = 'redis://r:1'\nblock_size = 16\n")
    assert made.gateway_env == {"BATON_REDIS": "redis://r:1"} and "--stand-in" in made.gateway_options
    assert "--block-size=16" in made.worker_options["decode"]
    text = printed(capsys, "--config", "up.toml", "--model", "m")
    assert line_of(text, "block_size").endswith("# up.toml: block_size")


def test_variables_of_the_gateway_win_over_the_folder_of_certs(tmp_path, monkeypatch, capsys):
    install(tmp_path / "certs")
    own = {"credentials": "own.toml", "cluster_secret": "own", "fleet_listen": "127.0.0.1:4567"}
    for name, value in own.items():
        monkeypatch.setenv(f"BATON_{name.upper()}", value)
    monkeypatch.setenv("BATON_TLS_CERT", "operator.crt")  # a role's own is the folder's: this one is for `baton top`
    capsys.readouterr()
    made = plan("--certs", "certs")
    assert not any("credentials" in option or "cluster-secret" in option for option in made.gateway_options)
    assert made.fleet_listen == "127.0.0.1:4567" and "--tls-cert=certs/gateway.crt" in made.gateway_options
    assert plan("--certs", "certs", "--gateway.fleet-listen", "127.0.0.1:9").fleet_listen == "127.0.0.1:9"
    text = printed(capsys, "--model", "m", "--certs", "certs")
    for name, value in own.items():
        assert f'"{value}"' in line_of(text, name) and line_of(text, name).endswith(f"# BATON_{name.upper()}")
    found = tomllib.loads(text)
    for role in ("prefill", "decode"):
        assert found[f"{role}_worker"]["tls_cert"] == f"certs/{role}.crt"
    certificates = [line for line in text.splitlines() if line.startswith("tls_cert =")]
    assert len(certificates) == 3 and all(line.endswith("# the folder of --certs") for line in certificates)


def test_the_number_of_gateways_is_no_address_for_workers(model, monkeypatch):
    monkeypatch.setenv("BATON_GATEWAYS", "2")
    made = plan()
    parser = argparse.ArgumentParser()
    add_flags(parser, WorkerSettings)
    options = WorkerProgram(model, made.worker_options).options_of("decode", "127.0.0.1:0")
    assert made.num_gateways == 2 and load_settings(WorkerSettings, parser.parse_args(options)).gateways == ()


@pytest.mark.parametrize(
    "variables, flags",
    [
        ({"ADMIN": "0.0.0.0:9464"}, ["--gateway.open-admin"]),
        ({"LISTEN": "0.0.0.0:50051", "GATEWAYS": "2", "CERTS": "certs"}, []),
        ({"LISTEN": "0.0.0.0:50051"}, ["--certs", "certs", "--transports", "tcp"]),
    ],
)
def test_variables_of_the_stack_are_no_settings_of_its_workers(monkeypatch, capsys, variables, flags):
    install(Path("certs"))
    same = [word for name, value in variables.items() for word in (f"--{name.lower()}", value)]
    wanted = plan(*flags, *same)
    for name, value in variables.items():
        monkeypatch.setenv(f"BATON_{name}", value)
    assert plan(*flags) == wanted
    capsys.readouterr()
    text = printed(capsys, "--model", "m", *flags)
    for name in variables:
        assert line_of(text, name.lower()).endswith(f"# BATON_{name}")


def test_the_gateway_is_checked_with_the_addresses_that_it_is_told(monkeypatch, capsys):
    monkeypatch.setenv("BATON_LISTEN", "0.0.0.0:50051")
    origins = ["--http", "127.0.0.1:8000", "--gateway.http-origins", "https://acme.example"]
    text = printed(capsys, "--model", "m", "--listen", "127.0.0.1:50051", *origins)
    assert line_of(text, "http_origins").endswith("# --gateway.http-origins")
    assert main(["config", "--model", "m"]) == 2
    assert "--listen 0.0.0.0:50051: beyond loopback" in capsys.readouterr().err


def test_a_process_is_killed_only_after_its_grace(monkeypatch):
    made = plan()
    assert made.drain_s == {"prefill": 15.0, "decode": 15.0} and made.gateway_drain_s == 40.0
    made = plan("--drain-grace-s", "60", "--gateway.drain-grace-s", "300")
    assert made.drain_s == {"prefill": 67.0, "decode": 67.0} and made.gateway_drain_s == 310.0
    assert plan(file="[decode_worker]\ndrain_grace_s = 20\n").drain_s == {"prefill": 15.0, "decode": 27.0}
    monkeypatch.setenv("BATON_DRAIN_GRACE_S", "50")
    made = plan()
    assert made.drain_s["decode"] == 57.0 and made.gateway_drain_s == 60.0
    assert plan("--together").gateway_drain_s == 117.0, "it drains the gateway, then the worker"


@pytest.mark.parametrize(
    "flags, own",
    [
        (["--decode", "2", "--decode.kv-dtype", "int8", "--transports", "shm,tcp"], {"kv_dtype": "int8"}),
        (["--prefill", "0", "--decode.kv-dtype", "int8"], {"kv_dtype": "int8"}),
        (["--prefill", "0", "--certs", "certs"], {"tls_cert": "certs/decode.crt", "tls_key": "certs/decode.key"}),
        (["--together", "--certs", "certs"], {"tls_cert": "certs/decode.crt", "tls_key": "certs/decode.key"}),
    ],
)
def test_what_is_printed_is_a_file_that_says_the_same(capsys, monkeypatch, flags, own):
    if "--certs" in flags:
        install(Path("certs"))
        capsys.readouterr()
    monkeypatch.setenv("BATON_MAX_NUM_SEQS", "7")
    flags = ["--model", "m", "--gateway.split", "always", *flags]
    text = printed(capsys, *flags)
    assert line_of(text, "max_num_seqs").endswith("# BATON_MAX_NUM_SEQS") and "= 7 " in line_of(text, "max_num_seqs")
    told = "--decode" if "--decode" in flags else "default"
    assert line_of(text, "decode").endswith(f"# {told}") and line_of(text, "split").endswith("# --gateway.split")
    assert tomllib.loads(text)["decode_worker"] == own
    monkeypatch.delenv("BATON_MAX_NUM_SEQS")
    Path("printed.toml").write_text(text)
    again = printed(capsys, "--config", "printed.toml")
    assert tomllib.loads(again) == tomllib.loads(text)
    assert line_of(again, "split").endswith("# printed.toml: [gateway]: split")
    assert plan("--max-num-seqs", "7", *flags).num_workers == plan(file=text).num_workers


@pytest.mark.parametrize(
    "flags, file, sources",
    [
        (["--block-size", "16"], "", ["--block-size"]),
        (["--block-size", "16", "--prefill.block-size", "4"], "", ["--prefill.block-size", "--block-size"]),
        (["--prefill.block-size", "4"], "", ["--prefill.block-size", "BATON_BLOCK_SIZE"]),
        (["--decode.block-size", "4"], "block_size = 8", ["BATON_BLOCK_SIZE", "--decode.block-size"]),
        (["--block-size", "16"], "[prefill_worker]\nblock_size = 8", ["--block-size"]),
    ],
)
def test_what_wins_over_a_variable_is_where_it_was_set(monkeypatch, capsys, flags, file, sources):
    """It was the variable's, beside a value that was not."""
    monkeypatch.setenv("BATON_BLOCK_SIZE", "64")
    Path("up.toml").write_text(file)
    text = printed(capsys, "--model", "m", "--config", "up.toml", *flags)
    assert [line.partition("# ")[2] for line in text.splitlines() if line.startswith("block_size =")] == sources


def test_the_name_of_a_model_is_no_setting_of_the_next(capsys):
    """So that the file which is printed does not give the demo's name to another model, or forbid several."""
    text = printed(capsys)
    assert re.search("^# served_model_name is not set +# default: baton-demo$", text, re.MULTILINE)
    Path("base.toml").write_text(text)
    assert re.search(
        "^# served_model_name is not set +# default$",
        printed(capsys, "--config", "base.toml", "--model", "m"),
        re.MULTILINE,
    )
    printed(capsys, "--config", "base.toml", "--model", "a=m,b=m")


def test_how_many_share_a_host_is_counted_unless_it_is_given(monkeypatch, capsys):
    """So that the file which is printed does not win over the count."""
    assert re.search("^# workers_per_host is not set +# counted", printed(capsys), re.MULTILINE)
    monkeypatch.setenv("BATON_WORKERS_PER_HOST", "6")
    assert re.search("= 6 +# BATON_WORKERS_PER_HOST$", line_of(printed(capsys), "workers_per_host"))
    with pytest.raises(SystemExit):
        main(["up", "--help-all"])
    assert re.search(r"--workers-per-host .*?\(default: counted;", capsys.readouterr().out, re.DOTALL)


def test_any_value_that_is_taken_is_printed_as_toml(capsys):
    flags = [f"--gateway.{name}=inf" for name in ("max-queue-wait-s", "max-timeout-s", "drain-grace-s")]
    Path("a\x7fb").mkdir()
    text = printed(capsys, "--model", "m", *flags, "--adapter-root", "a\x7fb", "--gateway.default-timeout-s", "1e18")
    Path("printed.toml").write_text(text)
    assert tomllib.loads(printed(capsys, "--config", "printed.toml")) == tomllib.loads(text)


@pytest.mark.parametrize(
    "file, words",
    [
        ("decoed = 2", ["up.toml", "decoed", "did you mean decode?"]),
        ("[gateway]\nsplitt = 'never'", ["up.toml: [gateway]", "splitt", "split"]),
        ("gateway = 1", ["up.toml", "[gateway]"]),
        ("decode = 0", ["--decode", "up.toml: decode"]),
        ("block_size = 33", ["--block-size 33", "up.toml: block_size"]),
        ("[decode_worker]\nblock_size = 33", ["--block-size 33", "up.toml: [decode_worker]: block_size"]),
        ("= 2", ["up.toml", "TOML"]),
    ],
)
def test_a_wrong_file_is_named(file, words):
    with pytest.raises(SettingsError) as raised:
        plan(file=file)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def test_a_wrong_variable_is_named(monkeypatch, capsys):
    monkeypatch.setenv("BATON_BLOCK_SIZE", "33")
    assert main(["config", "--model", "m"]) == 2
    assert "--block-size is set by BATON_BLOCK_SIZE" in capsys.readouterr().err


def test_a_mistyped_flag_gets_its_nearest_and_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["up", "--prefil", "2"])
    told = capsys.readouterr().err
    assert raised.value.code == 2 and told.startswith("usage: baton up ")
    assert "unrecognized arguments: --prefil 2; did you mean --prefill?" in told


@pytest.mark.parametrize(
    ("argv", "ending"),
    [
        (["bench", "--duration", "8"], "--duration 8\n"),  # dashes are no likeness: it had been --version
        (["up", "--gateway.redis", "URL"], "--gateway.redis URL; did you mean --redis?\n"),
        (["up", "--gateway.splt", "auto"], "--gateway.splt auto; did you mean --gateway.split?\n"),
        (["up", "--split", "always"], "--split always; did you mean --gateway.split?\n"),
        (["up", "--prefill-workers", "h:1"], "--prefill-workers h:1; did you mean --prefill?\n"),
        (["up", "--stand-in"], "--stand-in; did you mean --gateway.stand-in?\n"),  # not its opposite
        (["up", "--no-stand-in"], "--no-stand-in; did you mean --no-gateway.stand-in?\n"),
        (["up", "--port", "8000"], "--port 8000; give --listen HOST:PORT for gRPC, --http HOST:PORT for HTTP\n"),
        (["up", "--host=::"], "--host=::; give --listen HOST:PORT for gRPC, --http HOST:PORT for HTTP\n"),
    ],
)
def test_what_is_suggested_is_alike(capsys, argv, ending):
    with pytest.raises(SystemExit):
        main(argv)
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {ending}")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--listen", "0.0.0.0:50051"], "or say --gateway.insecure"),
        (["--listen", "0.0.0.0:50051", "--insecure"], "or say --gateway.insecure"),  # of workers
        (["--listen", "0.0.0.0:50051", "--gateway.insecure"], "need --gateway.cluster-secret"),
        (["--http", "0.0.0.0:8000"], "--http 0.0.0.0:8000: beyond loopback this needs --gateway.tls-cert, "),
        (["--admin", "0.0.0.0:9464", "--open-admin"], "or say --gateway.open-admin"),
        (["--listen", "50051"], "--listen: '50051' is not HOST:PORT"),
        (["--http", "127.0.0.1:50051"], "--http 127.0.0.1:50051: is --listen too"),
    ],
)
def test_what_the_gateway_would_refuse_is_told_by_flags_of_the_stack(flags, told):
    with pytest.raises(SettingsError) as raised:
        plan(*flags)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_help_fits_one_screen_and_help_all_has_every_flag(capsys):
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as raised:
            main(["up", flag])
        assert raised.value.code == 0
    short, full = (part for part in capsys.readouterr().out.split("usage: baton up")[1:])
    assert len(short.splitlines()) <= 60 and "--speculator" in short and "--lease-ttl-s" not in short
    assert "examples:" in short and "--help-all" in short
    assert re.search(r"--no-gateway.stand-in\s[^-]*\(default:\s+True\)", full)  # that of the command
    assert "--lease-ttl-s" in full and "[BATON_LEASE_TTL_S]" in full and "--gateway.max-queue-wait-s" in full
