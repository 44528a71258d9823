"""compose.yaml's CPU profile in containers: who may ask, what two gateways share, and what the loss of each part
costs."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.client import CallError
from tests.containers import images
from tests.containers.stack import Stack, total
from tests.support.pace import patience
from tests.support.waiting import until

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]
PROMPT = "def read_lines(path):\n    "
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(engine, cpu_image, record):
    images.make_stand_ins(engine)
    folder = engine.folder / f"stack-{int(time.time())}"
    stack = Stack(engine, folder)
    stack.down()  # of a run that was cut off
    try:
        begun = time.monotonic()
        stack.compose("up", "--detach", "--scale", "decode_worker_cpu=1")
        stack.wait_healthy("redis", "prefill_worker_cpu", "decode_worker_cpu", "gateway", "gateway_2", "prometheus")
        record["healthy_s"] = round(time.monotonic() - begun, 1)
        yield stack
        for service in ("gateway", "prefill_worker_cpu", "decode_worker_cpu", "redis", "prometheus"):
            (folder / f"{service}.log").write_text(stack.logs(service))
    finally:
        stack.down()


def started(stack: Stack, service: str) -> str:
    return stack.engine.inspect(stack.containers(service)[0])["State"]["StartedAt"]


def text_of(client, prompt: str = PROMPT, max_tokens: int = 32, **options) -> str:
    return client.generate(prompt, max_tokens=max_tokens, **GREEDY, **options).choices[0].text


def test_gateways_start_after_what_they_wait_for(stack):
    """And by then these are healthy, as compose.yaml has it."""
    before = [started(stack, name) for name in ("redis", "prefill_worker_cpu", "decode_worker_cpu")]
    assert max(before) < min(started(stack, "gateway"), started(stack, "gateway_2"))


def test_an_answer_by_key_and_a_refusal_without(stack):
    with stack.client() as client:
        assert text_of(client)
    for wrong in (None, "baton.k00000000." + "A" * 43):
        with stack.client(api_key=wrong) as stranger, pytest.raises(CallError) as refused:
            text_of(stranger)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_containers_run_as_the_users_that_they_are_given(stack):
    """Their roots are read-only, they have no capability, and they read their secrets; volumes are theirs to write."""
    for service, uid in (("gateway", 10001), ("prefill_worker_cpu", 10001), ("redis", 999), ("prometheus", 65534)):
        (container,) = stack.containers(service)
        status = stack.engine.docker("exec", container, "cat", "/proc/1/status").splitlines()
        fields = {line.partition(":")[0]: line.split()[1:] for line in status}
        assert set(fields["Uid"]) == {str(uid)}, service
        assert int(fields["CapEff"][0], 16) == int(fields["CapPrm"][0], 16) == 0 and fields["NoNewPrivs"] == ["1"]
        written = stack.engine.run(["/usr/bin/docker", "exec", container, "sh", "-c", "touch /opt/x || echo no"])
        assert written.strip() == "no", service
    (worker,) = stack.containers("prefill_worker_cpu")
    stack.engine.docker("exec", worker, "sh", "-c", "touch /kv/x /home/baton/x /tmp/x && rm /kv/x")
    assert stack.engine.docker("exec", worker, "stat", "-c", "%U %a", "/kv").split() == ["baton", "700"]


def test_gateways_share_the_index(stack):
    """What one had read is found by the other one in Redis, behind TLS and its user's list of commands."""
    assert stack.metric("baton_index_up") == stack.metric("baton_index_up", "ADMIN_PORT_2") == 1
    prompt = "# Count the words of a text, line by line, and print the ten most frequent ones.\n" * 12
    with stack.client("PORT") as one, stack.client("PORT_2") as two:
        first = one.generate(prompt, max_tokens=4, **GREEDY)
        time.sleep(1.0)  # the index is told of cached spans four times a second
        second = two.generate(prompt, max_tokens=4, **GREEDY)
    assert second.usage.cached_tokens >= 64 > first.usage.cached_tokens
    assert second.choices[0].text == first.choices[0].text


def test_a_worker_that_is_killed_in_mid_stream(stack, record):
    """Of two that a scaled service has the one that has more streams: these go on at the other one, with the very
    tokens of an undisturbed run."""
    scaled = ("up", "--detach", "--no-recreate", "--scale", "decode_worker_cpu=2", "decode_worker_cpu")
    stack.compose(*scaled)
    stack.wait_healthy("decode_worker_cpu")
    pages = {each: stack.admin_of(each) for each in stack.containers("decode_worker_cpu")}

    def kill() -> None:
        stack.engine.docker("kill", max(pages, key=lambda each: total(pages[each], "baton_sequences_running")))

    prompts = [f"# Number {each}\n{PROMPT}" for each in range(16)]
    with stack.client() as client:
        until(lambda: workers(stack) == 3, timeout_s=60)
        undisturbed = at_once(client, prompts, 1900)
        moved = stack.metric("baton_migrations_total")
        texts = at_once(client, prompts, 1900, kill)
        record["killed"] = {"streams": len(prompts), "moved": stack.metric("baton_migrations_total") - moved}
    stack.compose(*scaled)
    assert texts == undisturbed
    assert record["killed"]["moved"] >= 1, "all streams had ended before the worker was killed"


def at_once(client, prompts: list[str], max_tokens: int, when_begun: Callable[[], object] = bool) -> list[str]:
    """Return what all prompts together are answered; `when_begun` is called while each is in mid-stream. Raises
    CallError."""
    begun = threading.Barrier(len(prompts) + 1, timeout=patience(60))

    def ask(prompt: str) -> str:
        texts = []
        for message in client.stream(prompt, max_tokens=max_tokens, **GREEDY):
            if not texts:
                begun.wait()
            texts.append(message.text)
        return "".join(texts)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        begun.wait()
        when_begun()
        return [answer.result() for answer in answers]


def workers(stack: Stack) -> int:
    """Return how many workers serve, as Prometheus would read it of the first gateway."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{stack.ports['ADMIN_PORT']}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    serving = [line for line in lines if line.startswith("baton_workers{") and 'state="serving"' in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in serving))


def test_a_rolling_restart_fails_nothing(stack, record):
    """Each container in turn, gateways too, while clients that know both gateways ask on."""
    stack.compose("up", "--detach", "--no-recreate", "--scale", "decode_worker_cpu=2", "decode_worker_cpu")
    stack.wait_healthy("decode_worker_cpu")
    failed, answered, stop = [], [], threading.Event()

    def ask() -> None:
        with stack.client("PORT", "PORT_2") as client:
            while not stop.is_set():
                try:
                    answered.append(text_of(client, max_tokens=48))
                except CallError as error:
                    failed.append(repr(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for service in ("prefill_worker_cpu", "decode_worker_cpu", "gateway", "gateway_2"):
            for container in stack.containers(service):
                stack.engine.docker("restart", "--time", "50", container)
                stack.wait_healthy(service)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    record["rolling_restart"] = {"answered": len(answered), "failed": len(failed)}
    assert not failed and len(set(answered)) == 1, failed[:3]


def test_the_collector_keeps_spans_of_every_process(stack, record):
    """Long prompts that come together are read by the prefill worker: an idle decode worker reads a short one
    itself."""
    wanted = {"gateway", "prefill", "decode"}

    def roles() -> set[str]:
        return {role for role in wanted for service, names in stack.kept().items() if role in service and names}

    with stack.client() as client:
        at_once(client, [f"# Text {each}\n{PROMPT * 80}" for each in range(8)], 8)
    until(lambda: roles() == wanted, stack.kept, 60)
    record["collector"] = {service: sum(names.values()) for service, names in stack.kept().items()}


def test_prometheus_scrapes_each_process_and_raises_an_alert(stack, record):
    """Redis stops: BatonIndexDown fires after its minute; answers go on meanwhile, and it ends when Redis is back."""

    def targets() -> set[tuple[str, str]]:
        found = stack.prometheus("targets")["activeTargets"]
        return {(each["labels"]["job"], each["health"]) for each in found}

    jobs = {(f"baton-{role}", "up") for role in ("gateway", "prefill", "decode")} | {("collector", "up")}
    until(lambda: targets() == jobs, targets, 60)

    def firing() -> set[str]:
        alerts = stack.prometheus("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    stack.compose("stop", "redis")
    with stack.client() as client:
        assert text_of(client)
    stopped = time.monotonic()
    until(lambda: "BatonIndexDown" in firing(), lambda: stack.prometheus("alerts"), 180)
    record["alert_s"] = round(time.monotonic() - stopped)
    stack.compose("start", "redis")
    until(lambda: "BatonIndexDown" not in firing(), lambda: stack.prometheus("alerts"), 120)
    until(lambda: stack.metric("baton_index_up") == 1)


def test_logs_are_quiet_while_the_collector_is_away(stack, record):
    """What cannot be sent is said once, or once in a while, and not each time."""
    stack.compose("stop", "collector")
    since = time.time()
    with stack.client() as client:
        while time.time() < since + 45:
            text_of(client)
            time.sleep(1)
    lines = [
        line
        for service in ("gateway", "prefill_worker_cpu", "decode_worker_cpu")
        for container in stack.containers(service)
        for line in stack.engine.run(
            ["sh", "-c", f"/usr/bin/docker logs --since {int(since)} {container} 2>&1"]
        ).splitlines()
        if "export" in line.lower() or "4317" in line or "collector" in line
    ]
    record["lines_without_collector"] = len(lines)
    stack.compose("start", "collector")
    assert len(lines) <= 4, lines[:6]
