"""Packages named as gateway and workers are, for what starts and stops them: they listen, say that they are ready, and
drain."""

from pathlib import Path

from tests.support.process import ROOT

WORKER = """
import os, signal, socket, sys, time
argv = sys.argv[1:]
name = sys.argv[0].split("/")[-2]
def drain(*_):
    open("drained", "a").write(name + "\\n")
    while os.path.exists(f"{name}.hangs"):
        time.sleep(0.05)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
open(f"{name}.argv", "a").write("\\n".join(argv) + "\\n--\\n")
if os.path.exists(f"{name}.fails"):
    print(f"{name}: /m/model.safetensors is truncated", file=sys.stderr)
    sys.exit(1)
while os.path.exists(f"{name}.loads"):
    time.sleep(0.05)
listen = argv[argv.index("--listen") + 1]
host, port = listen.split(":")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((host, int(port)))
server.listen()
print(f"ready grpc={listen} admin=h:2 pid={os.getpid()}", flush=True)
while not os.path.exists(f"{name}.floods"):
    time.sleep(0.1)
    if os.path.exists(f"{name}.drains"):
        os.rename(f"{name}.drains", f"{name}.draining")
        follows = open(f"{name}.draining").read()
        print(f"draining next={follows}", flush=True)
        while os.path.exists(f"{name}.draining"):
            time.sleep(0.05)
        sys.exit(3 if follows == "away" else 0)
for _ in range(8000):
    print("x" * 1000, file=sys.stderr)
open(f"{name}.flooded", "a").close()
while True:
    time.sleep(1)
"""


def make_stand_ins(folder: Path) -> Path:
    """Write the packages, and a model `m`, into a folder that processes are to run in; return it. `NAME.fails`,
    `NAME.loads`, `NAME.hangs` and `NAME.floods` there make one fail or hang at its start, hang in its drain, or log
    8 MB; `NAME.drains`, in which is what follows, has one drain as if an operator asked it, until `NAME.draining` is
    gone; `NAME.argv`, `NAME.flooded` and `drained` tell what has happened."""
    for name in ("gateway", "prefill_worker", "decode_worker"):
        package = folder / name
        package.mkdir()
        (package / "__init__.py").write_text(f"__path__.append({str(ROOT / name)!r})\n")  # only __main__ is another
        (package / "__main__.py").write_text(WORKER)
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text("{}")
    return folder
