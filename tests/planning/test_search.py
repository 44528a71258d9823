"""The plan: the smallest that holds, said so that it can be started."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from gguf import GGMLQuantizationType as GGMLType

from baton.cli.main import main
from baton.cli.planning.picture_file import PictureError, write_picture
from baton.engine.core.config import EngineConfig
from baton.engine.core.device import PROCESS_BYTES
from baton.engine.models.registry import read_spec
from baton.loadgen.workload import Shape
from baton.planning import answer, search
from baton.planning.devices import GPUS, Device, find_device
from baton.planning.efficiency import shipped
from baton.planning.picture import day_picture, goodput_picture
from baton.planning.stored_form import StoredForm
from baton.planning.workload import drawn_entries
from baton.service.slo import Slo
from tests.chart.rendering import container, named, render
from tests.support.gguf.model_files import write_gguf
from tests.support.model_folders.families import tiny
from tests.support.models import make_model

TARGET = Path(__file__).resolve().parents[2] / "demo" / "target"
SHAPES = Path(__file__).resolve().parents[2] / "baton" / "planning" / "shapes"
SLO = Slo(ttft_s=1.0, tpot_s=0.03)
SHAPE = Shape(1000, 20)
PLAN = ["plan", "--rate", "1", "--lengths", "64,4", "--num-requests", "8", "--kv-dtype", "auto"]


def ask(rate, slo=SLO, num=30, shape=SHAPE, **options) -> search.Ask:
    return search.Ask(drawn_entries(rate, shape, num), rate, slo, 0.95, ("none",), ("auto",), **options)


def found(rate, device="H100", **options):
    return search.find(read_spec(SHAPES / "qwen3-8b"), GPUS[device], shipped("cuda"), ask(rate, **options))


def test_more_load_never_needs_fewer_devices():
    numbers = [found(rate)[0].num_devices for rate in (4, 120)]
    assert numbers == sorted(numbers) and numbers[0] < numbers[-1]


def test_the_chosen_stack_meets_the_objective_and_is_the_smallest_that_was_seen_to():
    choices = found(40)
    assert choices[0].outcome.met >= 0.95
    assert [choice.num_devices for choice in choices] == sorted(choice.num_devices for choice in choices)
    for choice in choices:
        assert all(each.goodput <= each.rate * 1.01 for each in choice.curve)


def test_what_nothing_can_do_is_told():
    with pytest.raises(search.NoPlan, match="a token takes .* even alone"):
        found(1, device="RTX4090", slo=Slo(ttft_s=1.0, tpot_s=0.001))
    with pytest.raises(search.NoPlan, match="A100 computes no fp8"):
        fp8 = ask(1)._replace(forms=("fp8",))
        search.find(read_spec(SHAPES / "qwen3-8b"), GPUS["A100"], shipped("cuda"), fp8)
    with pytest.raises(search.NoPlan, match="out of GPU memory"):
        search.find(read_spec(SHAPES / "llama-3.1-70b"), GPUS["H100"], shipped("cuda"), ask(1))
    with pytest.raises(search.NoPlan, match="nothing of up to 1 devices serves 200 requests/s"):
        found(200, max_devices=1)


def test_a_plan_for_which_no_size_is_small_enough_to_be_tried_says_how_many_it_needs():
    with pytest.raises(
        search.NoPlan, match=r"nothing of up to 1 devices serves 200 requests/s .*: it needs \d+ at least$"
    ):
        found(200, max_devices=1)


def test_a_rate_beyond_all_numbers_needs_more_than_there_are():
    with pytest.raises(search.NoPlan, match=r"serves 1e\+308 requests/s .*: it needs \d+ at least$"):
        found(1e308)


def test_prompts_that_share_a_prefix_need_no_more_devices_than_hold_them():
    """Fewer than without caches, and more than with all prompts' prefixes in them: they begin empty."""
    asked = ask(80, num=40, shape=Shape(4000, 20, shared=3840))
    best = search.find(read_spec(SHAPES / "qwen3-8b"), GPUS["H100"], shipped("cuda"), asked)[0]
    assert best.num_devices > 1
    assert search.evaluate(best.worker, 0, best.num_devices - 1, asked).met < asked.attainment


def test_a_small_model_on_a_large_device_is_served_without_blocks_that_nothing_fills(monkeypatch):
    """Each of its engines laid out all that the device holds, for each stack that was tried."""
    asked = ask(5, num=8, shape=Shape(64, 4))
    kind = next(search.candidates(read_spec(TARGET), GPUS["H100"], shipped("cuda"), asked))
    shapes, make = [], search.VirtualStack
    monkeypatch.setattr(search, "VirtualStack", lambda shape, *args: shapes.append(shape) or make(shape, *args))
    few = search.evaluate(kind, 1, 1, asked)
    assert shapes[0].prefill.num_blocks == shapes[0].decode.num_blocks < 100 < 10_000 < kind.memory.num_blocks
    monkeypatch.setattr(
        search, "_without_idle_blocks", lambda config, entries: dataclasses.replace(config, num_blocks=9999)
    )
    assert search.evaluate(kind, 1, 1, asked) == few and shapes[1].decode.num_blocks == 9999


def test_blocks_on_a_gpu_are_as_large_as_those_of_workers():
    """What is printed says nothing of them."""
    kind = next(search.candidates(read_spec(TARGET), GPUS["H100"], shipped("cuda"), ask(1, shape=Shape(64, 4))))
    assert {config.block_size for config in kind.configs.values()} == {EngineConfig(TARGET).block_size}


def on_a_cpu(memory_bytes: int) -> Device:
    rates = {"bf16": 1e11, "int8": 1e11}
    return Device("test", "cpu", memory_bytes, 2e10, rates, 2e9, cores=16, threads=2)


def test_workers_of_a_cpu_have_room_in_its_memory_together():
    spec, asked = read_spec(TARGET), ask(20, shape=Shape(256, 64))
    room = {}
    for memory_bytes in (8 << 30, 3 << 29):
        kind = next(search.candidates(spec, on_a_cpu(memory_bytes), shipped("cpu"), asked))
        assert kind.memory.total_bytes < 1 << 30
        room[memory_bytes] = [sum(size) for size in search.sizes(kind, asked)]
    assert max(room[8 << 30]) > 2 == max(room[3 << 29])
    whole = kind.memory.weight_bytes + kind.memory.kv_bytes + kind.memory.step_bytes
    for degree in (1, 4):
        taken = whole + degree * PROCESS_BYTES  # as the engine warns of
        assert dataclasses.replace(kind, degree=degree).room == (3 << 29) // taken
    with pytest.raises(search.NoPlan, match=r"2 workers of [\d,]+ bytes have room in this machine's 1,610,612,736"):
        search.find(spec, on_a_cpu(3 << 29), shipped("cpu"), ask(1000, shape=Shape(256, 64)))


def test_degrees_that_workers_refuse_are_not_planned(tmp_path):
    config = json.loads((TARGET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 2}))
    degrees = {
        folder: {
            kind.degree for kind in search.candidates(read_spec(folder), on_a_cpu(8 << 30), shipped("cpu"), ask(1))
        }
        for folder in (TARGET, tmp_path)
    }
    assert degrees == {TARGET: {1, 2, 4}, tmp_path: {1, 2}}


def test_what_starts_it_serves_what_was_planned(tmp_path, capsys):
    """The threads that workers have, the blocks, which three workers of one host would else have fewer of, and bf16
    where the folder's dtype is another."""
    wide = json.loads((TARGET / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    device = on_a_cpu(8 << 30)
    for folder, dtype in ((TARGET, None), (tmp_path, "bf16")):
        asked = ask(1, shape=Shape(64, 4), num=8)
        kind = next(search.candidates(read_spec(folder), device, shipped("cpu"), asked))
        choice = search.StackChoice(kind, 0, 1, search.evaluate(kind, 0, 1, asked), "")
        (line,) = answer.command_lines(choice, device, str(folder))
        assert {"--threads=2", f"--num-blocks={kind.memory.num_blocks}"} <= {*line.split()}
        assert ("--dtype=bf16" in line.split()) == (dtype == "bf16")
        assert main(["config", *line.split()[2:]]) == 0
        capsys.readouterr()
        (service,) = (
            each
            for each in yaml.safe_load("\n".join(answer.compose_override(choice, device)))["services"].values()
            if each["deploy"]["replicas"]
        )
        assert (service["environment"]["BATON_THREADS"], service["environment"].get("BATON_DTYPE")) == ("2", dtype)
        flags = yaml.safe_load("\n".join(answer.helm_values(choice, device)))["workers"]["decode"]["flags"]
        assert (flags["threads"], flags.get("dtype")) == (2, dtype)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    """The config.json of a folder in int4, without its weights."""
    folder = tmp_path_factory.mktemp("int4")
    config = json.loads((TARGET / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    return folder


@pytest.mark.parametrize("command", [["plan", "--rate", "1"], ["scaler", "--dry-run"]], ids=["plan", "scaler"])
def test_the_form_of_weights_that_are_not_here_is_asked_for(command, quantized, capsys):
    """Which is not in their config: planned in bf16 they were four times as large."""
    for option in ([], ["--quantization", "none"]):
        assert main([*command, "--model", str(quantized), *option]) == 2
        told = capsys.readouterr().err
        words = (
            "is quantized already and its weights are not here: say with --quantization int8, int4-g32 or fp8 what is"
        )
        assert f"{quantized} {words} nearest" in told
        assert told.count("\n") == 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Path]:
    """A folder that is quantized, and a .gguf file."""
    folder = tmp_path_factory.mktemp("stored")
    make_model(folder / "float")
    words = ["--model", str(folder / "float"), "--out", str(folder / "model"), "--scheme", "int4-rtn", "--group", "32"]
    assert main(["quantize", *words]) == 0
    model = tiny(1000)
    model.config.bos_token_id = model.config.eos_token_id = 1
    write_gguf(folder / "model.gguf", model, lambda name: GGMLType.Q8_0)
    return {"quantized already": folder / "model", "a GGUF file": folder / "model.gguf"}


@pytest.mark.parametrize("command", [["plan", "--rate", "1"], ["scaler", "--dry-run"]], ids=["plan", "scaler"])
def test_a_form_beside_that_of_the_files_is_refused(command, stored, capsys):
    """As workers refuse it."""
    for what, path in stored.items():
        for form in ("none", "int8"):
            assert main([*command, "--model", str(path), "--quantization", form]) == 2
            told = f"baton {command[0]}: --quantization {form}: {path} is {what}, and served as it is; leave it out\n"
            assert capsys.readouterr().err == told


def test_the_form_of_files_is_read(stored, capsys):
    """What workers hold of them in other tests (test_stored_form.py); here that it is planned, told and not asked
    for."""
    forms = {"quantized already": "int4-g32+bf16", "a GGUF file": "int8-g32"}
    for what, path in stored.items():
        assert main([*PLAN, "--model", str(path), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["choices"][0]
        assert told["form"] == forms[what] and "quantization" not in str(told["command_lines"])
        spec, fields = read_spec(path), told["memory"]
        held = StoredForm(spec, on_a_cpu(1)).held()
        assert (fields["linear weights"], fields["embedding and norms"]) == (held.kernel_bytes, held.other_bytes)
        form = StoredForm(spec, GPUS["H100"])
        asked = ask(1, shape=Shape(64, 4), num=8)._replace(forms=(form,))
        memory = next(search.candidates(spec, GPUS["H100"], shipped("cuda"), asked)).memory
        assert (memory.kernel_bytes, memory.other_weight_bytes) == (form.held().kernel_bytes, form.held().other_bytes)
        assert main(["scaler", "--dry-run", "--model", str(path), "--load", "1,64,4"]) == 0
        capsys.readouterr()


def test_what_is_quantized_is_started_as_it_is(quantized, capsys):
    """`baton up` refuses --quantization for it."""
    told = []
    for model in (quantized, TARGET):
        assert main([*PLAN, "--json", "--model", str(model), "--quantization", "int4-g32"]) == 0
        told.append(json.loads(capsys.readouterr().out)["choices"][0])
    ours, rounded = told
    assert ours["form"] == "int4-g32" and ours["memory"] == rounded["memory"]
    for what in ("command_lines", "compose_override", "helm_values"):
        assert "quantization" in str(rounded[what]).lower() and "quantization" not in str(ours[what]).lower()


def test_a_trace_whose_longest_have_no_room_is_planned_at_the_rate_of_the_others(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 1000 * number, "input_length": 64 if number % 2 else 3000, "output_length": 4}
        for number in range(41)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["plan", "--device", "cpu", "--trace", str(trace), "--quantization", "none", "--kv-dtype", "auto", "--json"]
    assert main(argv) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["rate"] == pytest.approx(0.5)
    assert "21 of 41 requests are longer than the model's context of 2048 tokens: left out" in told.err
    assert "20 requests of 64 + 4 tokens at 0.5/s" in told.err


def test_drawn_requests_beyond_the_context_are_left_out_too(capsys):
    """Lengths vary around their means: one of 300 refused the whole plan."""
    argv = ["plan", "--device", "cpu", "--rate", "0.5", "--lengths", "1700,8", "--num-requests", "20"]
    assert main([*argv, "--quantization", "none", "--kv-dtype", "auto", "--slo", "ttft=9s", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["rate"] == 0.5
    assert re.search(r"\d of 20 requests are longer than the model's context of 2048 tokens: left out", told.err)


def test_an_unknown_device_names_those_that_are_known():
    with pytest.raises(ValueError, match="device 'H300': one of cpu, H100, H200, B200, A100, L40S, RTX4090"):
        find_device("H300")
    assert find_device("rtx 4090") is GPUS["RTX4090"] and find_device("cpu") is None


# ---- the answer ----


@pytest.fixture(scope="module")
def plan():
    asked = ask(40)
    return search.find(read_spec(SHAPES / "qwen3-8b"), GPUS["H100"], shipped("cuda"), asked), asked


def test_the_answer_as_json_is_what_is_told(plan):
    choices, asked = plan
    told = json.loads(answer.PlanReport(choices, asked, GPUS["H100"], "extrapolated", 2.5, "qwen3-8b").as_json())
    first = told["choices"][0]
    assert first["devices"] == choices[0].num_devices and told["confidence"] == "extrapolated"
    tokens_per_s = first["outcome"]["output_tokens_per_s"]
    assert first["usd_per_million_output_tokens"] == pytest.approx(2.5 * first["devices"] * 1e6 / 3600 / tokens_per_s)
    assert first["memory"]["all"] <= GPUS["H100"].memory_bytes


def test_the_command_lines_are_ones_that_baton_up_takes(plan, capsys):
    choices, _ = plan
    for choice in choices:
        for line in answer.command_lines(choice, GPUS["H100"], "demo/target"):
            program, command, *options = line.split()
            assert (program, command) == ("baton", "up")
            assert main(["config", *[each for each in options if each not in ("--device", "cuda")]]) == 0
            assert "max_num_seqs" in capsys.readouterr().out.replace("-", "_")


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_the_override_has_a_gpu_for_each_worker(plan, num_prefill):
    """As compose.4gpu.yaml has them: a service for each, which computes on the first of its list."""
    choice = dataclasses.replace(plan[0][0], num_prefill=num_prefill, num_decode=3)
    services = yaml.safe_load("\n".join(answer.compose_override(choice, GPUS["H100"])))["services"]
    if not num_prefill:
        assert services.pop("prefill_worker") == {"deploy": {"replicas": 0}}
    visible = [service["environment"]["CUDA_VISIBLE_DEVICES"].split(",") for service in services.values()]
    assert [first for first, *_ in visible] == list("01234"[: num_prefill + 3])
    assert all(sorted(each) == sorted(visible[0]) for each in visible)
    assert services["decode_worker_3"]["extends"] == {"file": "compose.yaml", "service": "decode_worker"}
    assert all(
        service["environment"]["BATON_MAX_NUM_SEQS"] == str(choice.worker.batch) for service in services.values()
    )


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_the_chart_takes_the_values(plan, num_prefill):
    choice = dataclasses.replace(plan[0][0], num_prefill=num_prefill, num_decode=3)
    objects = render(yaml.safe_load("\n".join(answer.helm_values(choice, GPUS["H100"]))))
    for role, number in (("prefill", num_prefill), ("decode", 3)):
        spec = named(objects, "Deployment", role)["spec"]
        worker = container(spec["template"])
        assert spec["replicas"] == number
        if number:
            assert {"--device=cuda", f"--max-num-seqs={choice.worker.batch}"} <= set(worker["args"])
            assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_on_a_cpu_containers_of_one_service_share_the_cores(plan):
    device = dataclasses.replace(GPUS["H100"], kind="cpu")
    services = yaml.safe_load("\n".join(answer.compose_override(plan[0][0], device)))["services"]
    assert services["decode_worker_cpu"]["deploy"]["replicas"] == plan[0][0].num_decode
    assert services["decode_worker_cpu"]["environment"]["BATON_MAX_NUM_SEQS"] == str(plan[0][0].worker.batch)


def test_the_picture_has_a_line_for_each_of_the_best(plan):
    choices, _ = plan
    drawn = goodput_picture("a plan & more", answer.curves_of(choices), 40)
    assert drawn.startswith("<svg xmlns=") and drawn.count("<polyline") == len(choices)
    assert "a plan &amp; more" in drawn and "asked: 40/s" in drawn


def test_a_day_is_drawn_by_its_steps():
    """Four points a line: where it begins, both sides of its step, and where it ends."""
    numbers = [1] * 700 + [3] * 740
    drawn = day_picture("a day", {"prefill": numbers}, {"prefill": numbers})
    lines = re.findall(r'<polyline points="([^"]*)"', drawn)
    assert [len(line.split()) for line in lines] == [4, 4]


def test_the_command_prints_a_plan(tmp_path, capsys):
    picture = tmp_path / "plan.svg"
    argv = ["plan", "--model", "llama-3.2-1b", "--device", "L40S", "--rate", "5", "--num-requests", "30"]
    assert main([*argv, "--quantization", "none", "--kv-dtype", "auto", "--price", "1", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert (
        "1 devices" in out and "extrapolated" in out and "baton up --model DIR --prefill" in out and "$/M tokens" in out
    )
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "find"),
    [
        (["plan", "--rate", "5", "--device", "L40S"], "baton.planning.search.find"),
        (["scaler", "--dry-run", "--device", "H100"], "baton.planning.scaling.day.run_day"),
    ],
    ids=["plan", "scaler"],
)
def test_a_picture_that_has_no_place_is_told_before_the_work(options, find, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(find, lambda *_: pytest.fail("the work was done"))
    for path, why in ((tmp_path, "a folder"), (tmp_path / "none" / "a.svg", "there is no folder")):
        assert main([*options, "--model", "llama-3.2-1b", "--picture", str(path)]) == 1
        told = capsys.readouterr().err
        assert f"baton {options[0]}: --picture {path}: {why}" in told and told.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_told_in_one_line(tmp_path):
    taken = tmp_path / ("a" * 256)  # longer than a name can be
    with pytest.raises(PictureError, match=f"--picture {taken}: File name too long"):
        write_picture(taken, "<svg/>")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--rate R is needed"),
        (["--rate", "1", "--threads", "9999"], "--threads 9999: this machine has"),
        (["--rate", "1", "--lengths", "10"], "--lengths 10: two numbers"),
        (["--rate", "1", "--slo", "soon"], "'soon' is not an objective"),
        (["--rate", "1", "--device", "TPU"], "device 'TPU': one of"),
        (["--rate", "1", "--model", "nowhere"], "nowhere: no such model folder"),
        (["--rate", "1", "--attain", "2"], "--attain 2: a share"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
    ],
)
def test_wrong_use_is_told_in_one_line(options, words, capsys):
    assert main(["plan", *options]) == 2
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1
