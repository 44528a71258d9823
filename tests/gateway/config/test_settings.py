"""Settings of a gateway that cannot work are refused, in a line that names them."""

import math
from pathlib import Path

import pytest

from gateway.config.settings import GatewaySettings


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"prefill_workers": ("a:1",), "decode_workers": ("a:1",)}, "a:1"),
        ({"listen": "0.0.0.0:50051", "insecure": True}, "--cluster-secret"),
        ({"max_unread_tokens": 0}, "--max-unread-tokens"),
        ({"decode_workers": ("localhost:70000",)}, "^--decode-workers: 'localhost:70000' is not HOST:PORT$"),
        ({"decode_workers": ("decode",)}, "^--decode-workers: 'decode' is not HOST:PORT$"),
        ({"decode_workers": ("::1:50062",)}, "^--decode-workers: '::1:50062' is not HOST:PORT: .* takes brackets"),
        ({"decode_workers": ("fe80::1",)}, "^--decode-workers: 'fe80::1' is not HOST:PORT: .* takes brackets"),
        ({"prefill_workers": ("decode..svc:50062",)}, "^--prefill-workers: 'decode..svc:50062' .* no host can have"),
        ({"prefill_workers": (f"{'p' * 64}.svc:50061",)}, "^--prefill-workers: .* no host can have that name$"),
        ({"model_root": Path("/no/such")}, "^--model-root /no/such: no such folder$"),
        ({"max_queued_requests": -1}, "^--max-queued-requests -1: must be 0 or more$"),
        ({"max_queue_wait_s": -1.0}, "^--max-queue-wait-s -1.0: must be 0 or more$"),
        ({"max_queue_wait_s": math.nan}, "^--max-queue-wait-s nan: must be 0 or more$"),
        ({"drain_grace_s": -5.0}, "^--drain-grace-s -5.0: must be 0 or more$"),
        ({"drain_grace_s": math.nan}, "^--drain-grace-s nan: must be 0 or more$"),
        ({"default_timeout_s": math.nan}, "^--default-timeout-s nan: must be over 0$"),
        ({"max_timeout_s": math.nan}, "^--max-timeout-s nan: must be over 0$"),
    ],
)
def test_settings_that_cannot_work(tmp_path, fields, named):
    with pytest.raises(ValueError, match=named):
        GatewaySettings(**{"model": tmp_path, "decode_workers": ("d:1",), **fields})
