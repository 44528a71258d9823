"""`baton up` with stand-ins for gateway and workers: options, the ready line, failures in one line, drain and kill.

The stand-ins are packages of the same names in the folder that it runs in. The real ones are in tests/e2e.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from baton import system
from baton.cli.cluster import up
from baton.cli.launch import worker_options
from baton.cli.launch.placing.keeper import StartError
from baton.cli.main import main
from baton.service.settings import SettingsError, make_parser
from tests.support.launch.stand_ins import make_stand_ins
from tests.support.pace import patience
from tests.support.process import ROOT
from tests.support.waiting import until


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_stand_ins(tmp_path)


def start(folder: Path, *options: str) -> subprocess.Popen:
    argv = [sys.executable, "-m", "baton.cli", "up", "--model", "m", "--listen", "127.0.0.1:0", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=patience(30))
    finally:
        process.kill()
    return process.returncode, out, err


def argvs(folder: Path, name: str) -> list[list[str]]:
    return [text.strip().split("\n") for text in (folder / f"{name}.argv").read_text().split("--\n")[:-1]]


def test_ready_line_options_and_drain_order(folder):
    process = start(folder, "--decode", "2", "--block-size", "16", "--prefill.threads=1", "--admin", "127.0.0.1:0")
    ready = dict(field.split("=") for field in process.stdout.readline().split()[1:])
    assert int(ready["pid"]) == process.pid and ready["grpc"].startswith("127.0.0.1:") and ready["admin"]
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 0 and "draining" in err
    assert f"baton: page http://{ready['admin']}/; next: baton generate" in err and ready["grpc"] in err
    assert (folder / "drained").read_text().split()[0] == "gateway"
    assert sorted((folder / "drained").read_text().split()[1:]) == ["decode_worker", "decode_worker", "prefill_worker"]
    (prefill,), decode, (gateway,) = (argvs(folder, name) for name in ("prefill_worker", "decode_worker", "gateway"))
    assert {"--block-size=16", "--threads=1"} <= set(prefill)
    assert len(decode) == 2 and all("--block-size=16" in argv and "--threads=1" not in argv for argv in decode)
    listens = [argv[argv.index("--listen") + 1] for argv in decode]
    assert sorted(gateway[gateway.index("--decode-workers") + 1].split(",")) == sorted(listens)
    assert "--admin=127.0.0.1:0" in gateway and not any(argument.startswith("--redis") for argument in gateway)


def test_the_hint_names_one_of_several_models(folder):
    process = start(folder, "--model", "my chat=m,code=m")
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    status, _, err = finish(process)
    assert status == 0 and """ next: baton generate "def f(x):" --model 'my chat' --target """ in err


async def test_a_signal_that_comes_as_the_start_ends_is_heard_by_the_next():
    signals: asyncio.Queue[None] = asyncio.Queue()

    async def start() -> bool:
        signals.put_nowait(None)
        return True

    assert await up._unless_signalled(start(), signals)
    assert not signals.empty()


def test_several_gateways(folder):
    process = start(folder, "--gateways", "3", "--admin", "127.0.0.1:4567", "--http", "127.0.0.1:0")
    ready = dict(field.split("=") for field in process.stdout.readline().split()[1:])
    gateways = argvs(folder, "gateway")
    listens = [argv[argv.index("--listen") + 1] for argv in gateways]
    assert sorted(listens) == sorted(ready["gateways"].split(",")) and len(set(listens)) == 3
    assert len({argv[argv.index("--decode-workers") + 1] for argv in gateways}) == 1
    assert len({argv[argv.index("--http") + 1] for argv in gateways}) == 3
    assert sum("--admin" in argv for argv in gateways) == 2, "the address that was given is the first one's"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


def test_a_dead_worker_listens_at_its_address_again(folder):
    process = start(folder)
    process.stdout.readline()
    children = psutil.Process(process.pid).children()
    next(child for child in children if "decode_worker" in child.cmdline()).kill()
    until(lambda: len(argvs(folder, "decode_worker")) == 2)
    first, second = (argv[argv.index("--listen") + 1] for argv in argvs(folder, "decode_worker"))
    assert first == second
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0


def scale(folder: Path, control: str, *wanted: str) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "baton.cli", "scale", *wanted, "--launcher", control]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(60))


def test_scaled_up_and_down(folder):
    """Later workers register with the gateways; a worker that goes is drained first, and stays away."""
    process = start(folder, "--gateways", "2")
    ready = dict(field.split("=") for field in process.stdout.readline().split()[1:])
    done = scale(folder, ready["control"], "decode=3")
    assert done.returncode == 0 and done.stdout.count(" serving ") == 4, done.stderr
    first, *later = argvs(folder, "decode_worker")
    assert first[first.index("--gateways") + 1] == "", "the gateways know it"
    assert {argv[argv.index("--gateways") + 1] for argv in later} == {ready["gateways"]} and len(later) == 2
    done = scale(folder, ready["control"], "decode=1", "prefill=0")
    assert done.returncode == 0 and [line.split()[:3] for line in done.stdout.splitlines()[1:]] == [
        ["decode", "worker", "0"]
    ]
    assert sorted((folder / "drained").read_text().split()) == ["decode_worker", "decode_worker", "prefill_worker"]
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0 and len(argvs(folder, "decode_worker")) == 3, (
        "what was drained was not started again"
    )


def test_a_worker_that_does_not_start_is_told_to_who_scales(folder):
    process = start(folder)
    ready = dict(field.split("=") for field in process.stdout.readline().split()[1:])
    (folder / "decode_worker.fails").touch()
    done = scale(folder, ready["control"], "decode=2")
    assert done.returncode == 1 and "model.safetensors is truncated" in done.stderr
    (folder / "decode_worker.fails").unlink()
    assert scale(folder, ready["control"], "decode=2").returncode == 0
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0


@pytest.mark.parametrize("wanted", ["decode=0", "decode", "encode=1", "decode=x", "decode=-1", "decode=5000"])
def test_what_no_stack_can_have_is_refused(folder, wanted):
    done = scale(folder, "127.0.0.1:1", wanted)
    assert done.returncode == 2 and wanted.split("=")[0] in done.stderr and len(done.stderr.splitlines()) == 1


def test_second_signal_kills(folder):
    (folder / "gateway.hangs").touch()
    process = start(folder)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    until((folder / "drained").exists)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 1
    assert (folder / "drained").read_text().split() == ["gateway"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_before_it_is_ready_is_no_failure(folder, number):
    (folder / "decode_worker.loads").touch()
    process = start(folder)
    until((folder / "decode_worker.argv").exists)
    process.send_signal(number)
    status, out, err = finish(process)
    assert (status, out) == (0, "") and err.splitlines()[-1] == "baton: stopped before it was ready"


def test_failed_start_is_one_line_and_stops_the_rest(folder):
    (folder / "decode_worker.fails").touch()
    (folder / "prefill_worker.fails").touch()
    status, out, err = finish(start(folder))
    assert (status, out) == (1, "")
    assert len(err.splitlines()) == 1 and "model.safetensors is truncated" in err


@pytest.mark.parametrize("flag", ["--listen", "--control"])
def test_port_taken(folder, flag):
    """The one of --control is bound once processes are started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "127.0.0.1:%d" % taken.getsockname()[1]
        status, out, err = finish(start(folder, flag, address))
    assert (status, out) == (1, "") and len(err.splitlines()) == 1 and address in err
    assert flag == "--control" or not (folder / "gateway.argv").exists()


def plan(*argv: str):
    parser = make_parser("baton", "")
    up.add_parser(parser.add_subparsers())
    return up.make_plan(parser.parse_args(["up", *argv]))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--quantization", "int2"], ["--quantization", "int2"]),
        (["--kv-dtype", "fp4"], ["--kv-dtype", "fp4"]),
        (["--speculator", "luck"], ["--speculator", "luck"]),
        (["--draft-model", "d"], ["--draft-model"]),
        (["--num-draft-tokens", "4"], ["--num-draft-tokens"]),
        (["--gpu-memory-utilization", "0.9", "--device", "cpu"], ["--gpu-memory-utilization"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization 1.5"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--decode.quantization", "int2"], ["--decode.quantization", "int2"]),
        (["--prefill", "0", "--prefill.threads", "1"], ["--prefill.threads", "--prefill 0"]),
        (["--threads", "1", "--prefill.threads", "2", "--decode.threads", "2"], ["--threads"]),
        (["--prefill.block-size", "48"], ["--block-size 48"]),
        (["--block-size", "x"], ["--block-size", "whole number"]),
        (["--prefill.block-size", "x"], ["--prefill.block-size", "whole number"]),
        (["--threads", "0"], ["--threads"]),
        (["--transports", "udp"], ["--transports", "udp"]),
        (["--decode", "0"], ["--decode"]),
        (["--address", "auto"], ["--address", "--launcher ray"]),
        (["--kv-port", "50070"], ["--kv-port 50070", "2 workers"]),
        (["--prefill", "0", "--decode", "2", "--kv-port", "50070"], ["--kv-port 50070", "2 workers"]),
        (["--control", "10.0.0.1:50050"], ["--control 10.0.0.1:50050", "--certs"]),
        (["--together", "--decode", "2"], ["--together", "--decode"]),
        (["--together", "--gateways", "2"], ["--together", "--gateways"]),
        (["--together", "--launcher", "ray"], ["--together", "--launcher ray"]),
        (["--together", "--gateway.split", "always", "--no-gateway.stand-in"], ["--gateway.split always", "stand-in"]),
        (["--prefill", "0", "--gateway.split", "always", "--no-gateway.stand-in"], ["--prefill 0", "stand-in"]),
        (
            ["--prefill.transports", "tcp,grpc", "--decode.transports", "shm"],
            ["--prefill.transports tcp,grpc and --decode.transports shm have none in common"],
        ),
        (["--together", "--prefill.threads", "1"], ["--prefill.threads", "--prefill 0"]),
    ],
)
def test_options_without_effect_are_refused(folder, options, words):
    with pytest.raises(SettingsError) as raised:
        plan("--model", str(folder / "m"), *options)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        ["--prefill.kv-port", "50070", "--decode.kv-port", "50080"],
        ["--decode.kv-port", "50070"],
        ["--together", "--kv-port", "50070"],
        ["--kv-port", "50070", "--launcher", "ray"],
    ],
)
def test_one_worker_of_a_machine_may_have_a_port_for_kv(folder, options):
    """On a cluster those of one port may be on several machines."""
    planned = plan("--model", str(folder / "m"), *options)
    assert "--kv-port=50070" in [*planned.worker_options["prefill"], *planned.worker_options["decode"]]


@pytest.mark.parametrize(
    "options",
    [
        ["--gateway.split", "always", "--no-gateway.stand-in"],
        ["--gateway.split", "always", "--prefill", "0"],
        ["--prefill.transports", "tcp,shm", "--decode.transports", "shm"],
        ["--prefill.transports", "tcp", "--decode.transports", "auto"],
        ["--prefill", "0", "--decode.transports", "shm"],
    ],
)
def test_what_may_serve_is_not_refused(folder, options):
    assert plan("--model", str(folder / "m"), *options)


def test_missing_model_is_named(tmp_path):
    with pytest.raises(StartError, match="nowhere"):
        plan("--model", str(tmp_path / "nowhere"))


def test_shipped_model_is_the_default():
    assert plan().models == {None: ROOT / "demo" / "target"}


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["what"],
        ["up", "--no-such"],
        ["up", "--prefil", "1"],
        ["generate"],
        ["--json", "doctor"],
        ["--target=x", "generate", "hi"],
    ],
)
def test_wrong_options_exit_2_without_a_traceback(argv):
    done = subprocess.run([sys.executable, "-m", "baton.cli", *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr and not done.stdout and "Traceback" not in done.stderr


def test_an_option_before_the_command_is_told_where_it_goes(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--target=x", "generate", "hi"])
    assert raised.value.code == 2
    assert capsys.readouterr().err.endswith("baton: error: options go behind the command: baton generate --target=x\n")


def test_what_is_no_port_is_told_before_a_model_is_read(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["rank", "--leader", "127.0.0.1:1", "--model", "m", "--kv-port", "70000"])
    assert raised.value.code == 2
    assert capsys.readouterr().err.endswith("--kv-port: '70000' is not a port: must be from 1 to 65535\n")


@pytest.mark.parametrize("argv", [[], ["up"], ["generate"], ["train-demo"]])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(argv, flag):
    done = subprocess.run([sys.executable, "-m", "baton.cli", *argv, flag], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout and not done.stderr


def loaded_by(program: str) -> set[str]:
    program += "; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_is_light():
    heavy = {"torch", "transformers", "tokenizers", "numpy", "opentelemetry", "redis"}
    assert not heavy & loaded_by("import baton.cli.main, baton.cli.cluster.up, baton.cli.client.bench")


def test_a_command_does_not_wait_for_what_others_import():
    called = "import contextlib\nwith contextlib.suppress(SystemExit): main(['up', '--prefill', 'x'])"
    assert not {"tqdm", "baton.cli.client.bench"} & loaded_by(f"from baton.cli.main import main\n{called}\npass")


def test_a_worker_imports_of_torch_what_torch_imports():
    """No compiler of torch's, no training, nothing for .gguf files: each takes a tenth of a second to some seconds. The
    tokenizer is what constraints are compiled from."""
    load = "from pathlib import Path; from baton.engine.core.config import EngineConfig; from baton.engine.engine import Engine"
    load += "; Engine.load(EngineConfig(Path('demo/target'), num_blocks=64))"
    beyond = loaded_by(f"import torch, baton.worker.app; {load}") - loaded_by("import torch")
    rooms = {".".join(name.split(".")[:2]) for name in beyond}
    assert not {"torch._dynamo", "torch._inductor", "torch.testing", "torch.onnx"} & rooms
    assert not {"sympy", "transformers", "gguf", "redis", "jinja2"} & rooms


def test_workers_share_the_cores(folder, monkeypatch):
    """Workers without a number of threads divide the cores by themselves; where some have one, or ranks, those that are
    left are divided among the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(system, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def threads(*options: str) -> tuple[list[str], list[str]]:
        made = plan("--model", str(folder / "m"), *options).worker_options
        return tuple([word for word in made[role] if "--threads" in word] for role in ("prefill", "decode"))

    assert threads() == threads("--prefill", "2", "--decode", "3") == ([], [])
    assert threads("--threads", "auto") == (["--threads=auto"], ["--threads=auto"]), "and no variable says otherwise"
    assert threads("--prefill.threads", "4", "--decode", "3") == (["--threads=4"], ["--threads=4"])
    assert threads("--prefill.threads", "10", "--decode", "2") == (["--threads=10"], ["--threads=3"])
    assert threads("--threads", "5", "--decode.threads", "auto") == (["--threads=5"], ["--threads=11"])
    assert threads("--threads", "32") == (["--threads=32"], ["--threads=32"]), "an explicit value holds"
    assert threads("--prefill", "20", "--decode.threads", "1")[0] == ["--threads=1"], "a worker has one at least"
    assert threads("--tensor-parallel", "2") == (["--threads=4"], ["--threads=4"]), "of each rank"
    assert threads("--prefill.tensor-parallel", "4", "--decode.threads", "4") == (["--threads=3"], ["--threads=4"])
    with monkeypatch.context() as gpus:
        gpus.setattr(worker_options, "visible_gpus", lambda: ["0"])
        assert threads() == (["--threads=8"], ["--threads=8"]), "on GPUs nobody else divides what the host computes"
        assert threads("--device", "cpu") == ([], [])
    with monkeypatch.context() as container:
        container.setattr(system, "cpu_quota", lambda: system.CpuQuota(6, 1))
        assert threads("--tensor-parallel", "2") == (["--threads=1"], ["--threads=1"]), "of a container's quota"
        assert threads("--prefill.threads", "2") == (["--threads=2"], ["--threads=4"])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads() == ([], []), "each reads it itself"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("BATON_THREADS", "3")
    assert threads() == (["--threads=3"], ["--threads=3"])


def test_one_worker_together_with_its_gateway_has_all_cores(folder, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(system, "cpu_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    made = plan("--model", str(folder / "m"), "--together", "--block-size", "16")
    assert made.together and dict(made.num_placed) == {"prefill": 0, "decode": 0}
    assert "--block-size=16" in made.worker_options["decode"]
    assert not any("--threads" in option for option in made.worker_options["decode"]), "it finds no other"


def test_gateway_options_go_to_the_gateway(folder):
    made = plan("--model", str(folder / "m"), "--gateway.cluster-secret", "s", "--redis", "redis://h:1/0")
    assert set(made.gateway_options) == {"--cluster-secret=s", "--stand-in"}
    assert made.gateway_env == {"BATON_REDIS": "redis://h:1/0"}


def test_the_password_of_redis_is_in_no_command_line(folder):
    (folder / "up.toml").write_text("redis = 'redis://:sesame@127.0.0.1:9/0'\n")
    process = start(folder, "--config", "up.toml")
    process.stdout.readline()
    programs = psutil.Process(process.pid).children(recursive=True)
    gateways = [each for each in programs if "gateway" in each.cmdline()]
    try:
        assert gateways and not any("sesame" in word for each in programs for word in each.cmdline())
        assert {each.environ()["BATON_REDIS"] for each in gateways} == {"redis://:sesame@127.0.0.1:9/0"}
    finally:
        process.send_signal(signal.SIGTERM)
        finish(process)


def test_roles_stand_in_for_each_other_unless_told_otherwise(folder, monkeypatch):
    assert "--stand-in" in plan("--model", str(folder / "m")).gateway_options
    assert "--no-stand-in" in plan("--model", str(folder / "m"), "--no-gateway.stand-in").gateway_options
    monkeypatch.setenv("BATON_STAND_IN", "false")
    assert not any("stand-in" in option for option in plan("--model", str(folder / "m")).gateway_options)
