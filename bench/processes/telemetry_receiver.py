"""Receive the reports of bench/telemetry.py: a real OTLP receiver in a process of its own, which prints its number of
spans."""

import time

from tests.support.observe.otlp import Receiver

INTERVAL_S = 1.0

if __name__ == "__main__":
    with Receiver() as receiver:
        print(f"ready endpoint={receiver.endpoint}", flush=True)
        while True:
            time.sleep(INTERVAL_S)
            print(f"spans={len(receiver.spans)}", flush=True)
