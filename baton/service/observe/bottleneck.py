"""Name what limits a run, in one sentence: what requests waited for, and the one lever to try.

The whole time of a request is divided among BOTTLENECKS (gateway/request/bottlenecks.py), so the shares of many
requests can be added."""

from collections.abc import Mapping
from typing import NamedTuple

LEVERS = {
    "client": "read the answers faster, or ask for fewer logprobs",
    "cores": "give the host more cores or its containers a higher CPU limit, or run fewer workers on it",
    "gateway": "add a gateway, or send fewer and larger messages",
    "network": "bring gateway and workers closer together, or mend the network between them",
    "prefill queue": "add a prefill worker, or lower the rate",
    "decode queue": "add a decode worker, raise --max-num-seqs, or lower the rate",
    "kv pool": "give workers more KV blocks, store KV in int8, or add a decode worker",
    "prefill compute": "add prefill workers, or let prompts share more of their prefix",
    "transfer": "move the workers to one host (shm, cuda_ipc) or a faster network, or store KV in int8",
    "decode bandwidth": "quantize weights (int8, int4) or turn speculation on; for more streams add decode workers",
}
BOTTLENECKS = tuple(LEVERS)
SENDER_LEVER = "give the load generator more --processes, or a machine of its own"
# for the bottleneck "client", as the stack sees it
MORE_LOAD = "send more requests, or more at once: the stack has room"
COLD_LEVER = "restart workers one after the other, so that the others keep their caches; this one's fills by itself"
FULL_HOST = 0.9  # busy share above which another worker would only share the cores
LEAST_AT_ONCE = 0.5  # mean number of requests in the stack below which it waits for its clients
LONG_PROMPT = 1024  # mean tokens to read per prompt above which the sentence names them
COLD_SHARE = 0.5  # share of the former cache hits below which the caches are cold
EVIDENCE = {
    "client": "answers wait for their clients to read them",
    "cores": "processes wait for a core",
    "gateway": "requests and tokens wait for the gateway's event loop",
    "network": "messages between gateway and workers are on their way",
    "prefill queue": "requests wait in queues, mostly for a prefill worker",
    "decode queue": "requests wait in queues, mostly for a decode worker",
    "kv pool": "requests wait for KV blocks that others hold",
    "prefill compute": "reading prompts takes the most",
    "transfer": "decoding waits for KV that is still on its way",
    "decode bandwidth": "writing tokens takes the most",
}
# Bottlenecks whose lever is another worker.
_MORE_WORKERS = ("prefill queue", "decode queue", "prefill compute", "decode bandwidth")


class Bottleneck(NamedTuple):
    name: str  # one of BOTTLENECKS, or "nothing" if nothing was answered
    sentence: str


class PromptFacts(NamedTuple):
    """What the prompts of a run were like; the sentence for "prefill compute" names it."""

    mean_read: float = 0.0  # tokens of a prompt that no cache held
    cached_share: float = 0.0  # of all prompt tokens
    cached_before: float = 0.0  # the same before a worker started; 0 if none did

    @property
    def is_cold(self) -> bool:
        """Return whether caches hold far less than before a worker started."""
        return self.cached_share < COLD_SHARE * self.cached_before


NO_FACTS = PromptFacts()


def bottleneck_of(spent_s: Mapping[str, float], facts: PromptFacts = NO_FACTS) -> Bottleneck:
    """Return the largest bottleneck. `spent_s` has the seconds of answered requests, by entries of BOTTLENECKS."""
    total_s = sum(spent_s.values())
    if total_s <= 0:
        return Bottleneck("nothing", "No request was answered, so it is unknown what limits the run.")
    name = max(BOTTLENECKS, key=lambda each: spent_s.get(each, 0.0))
    evidence = f"{EVIDENCE[name]} ({spent_s[name] / total_s:.0%} of the answered requests' time)"
    if name != "prefill compute":
        return worded(name, evidence, LEVERS[name])
    return worded(name, evidence + _reason_of(facts), COLD_LEVER if facts.is_cold else LEVERS[name])


def bottleneck_of_stack(spent_s: Mapping[str, float], window_s: float, facts: PromptFacts = NO_FACTS) -> Bottleneck:
    """Return the bottleneck as the stack itself sees it. `spent_s` is that of the requests that ended in the last
    `window_s`; its sum over `window_s` is the mean number of concurrent requests (Little's law)."""
    at_once = sum(spent_s.values()) / max(window_s, 1e-9)
    if spent_s and at_once < LEAST_AT_ONCE:
        return worded("client", f"the stack waits for requests ({at_once:.2f} at a time in the mean)", MORE_LOAD)
    return bottleneck_of(spent_s, facts)


def aware_of_host(bottleneck: Bottleneck, num_cores: int, busy: float) -> Bottleneck:
    """Add to advice for another worker that it does not help on this host if its cores are already busy (`busy` is a
    share, 0 to 1)."""
    if bottleneck.name not in _MORE_WORKERS or busy < FULL_HOST:
        return bottleneck
    usage = f"the {num_cores} cores that may be used here are {busy:.0%} busy"
    caveat = f"Another worker needs another host, or a higher CPU limit: {usage}."
    return Bottleneck(bottleneck.name, f"{bottleneck.sentence} {caveat}")


def worded(name: str, evidence: str, lever: str) -> Bottleneck:
    return Bottleneck(name, f"Bound by {name}: {evidence}. Try this: {lever}.")


def _reason_of(facts: PromptFacts) -> str:
    if facts.is_cold:
        was, now = facts.cached_before, facts.cached_share
        return f", since a worker has started with a cold cache: {now:.0%} of the prompts was found, {was:.0%} before"
    if facts.mean_read >= LONG_PROMPT:
        return f", since prompts are long: {facts.mean_read:,.0f} tokens each are in no cache"
    return ""
