"""`python -m tests.support.patient MODULE ...` is `python -m MODULE ...`, but a gateway there waits long for the offer of a prefix:
on a busy machine an answer takes more than the 20 ms after which a prompt is computed instead."""

import runpy
import sys

from gateway.attempts import prefix_source

prefix_source.OFFER_WAIT_S = 10.0
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
