"""Receive the reports of bench/telemetry.py: a real OTLP receiver in its own process, which prints its number of
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
