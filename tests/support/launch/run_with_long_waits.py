"""Run a module with long waits: `python -m tests.support.launch.run_with_long_waits MODULE ...` is
`python -m MODULE ...`, but a gateway there waits long for the offer of a prefix, and a worker that is drained for who
asks for its KV: on a busy machine an answer takes more than the 20 ms, or half a second (a second and a half was seen),
after which a prompt is computed instead."""

import runpy
import sys

from tests.support.pace import patience

if sys.argv[1] == "gateway":
    from gateway.attempts import prefix_source

    prefix_source.OFFER_WAIT_S = 10.0
else:
    from baton.worker.session import drain

    drain.ASK_S = patience(2)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
