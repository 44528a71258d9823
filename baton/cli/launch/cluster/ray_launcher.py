"""Place workers on the nodes of a Ray cluster. An actor owns the process of each worker; of Ray only its core is used.

Ray takes 15 s to notice a lost node. Here each worker and its actor are asked twice a second, and once neither has
answered twice, the worker is placed again on another node. Ray's own notice comes later and changes nothing."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from baton.addresses import split_address
from baton.cli.launch.cluster.worker_actor import Where, WorkerActor, settings_env
from baton.cli.launch.placing.keeper import Life, StartError
from baton.cli.launch.placing.launcher import DRAIN_S, PlacedWorker, Resources, WorkerBoard, WorkerProgram
from baton.cli.launch.placing.log import log
from baton.lines import one_line
from baton.service.net.client import open_channel
from baton.service.security.access import Access
from baton.service.security.exposure import is_loopback
from baton.service.security.tls import WORKER_NAME

_DRAIN_CALL_S = 5.0  # beyond the drain itself
_BEAT_S, _ANSWER_S, _MISSES = 0.5, 1.0, 2
_CONNECT_S = 5.0
_SHUN_S = 60.0  # how long a lost node is avoided: until Ray has noticed too
# Without room: wait before other nodes are tried, before it is reported, before giving up; a cluster takes minutes to
# grow.
_TRY_S, _REPORT_S, _PLACE_S = 2.0, 5.0, 300.0
_PAUSE_S, _MAX_PAUSE_S, _SETTLED_S = 0.5, 30.0, 60.0


class RayLauncher:
    """Places workers that register with `gateways`, from nodes in `networks`. Ray ends them when this process ends."""

    keeps_roles = False

    def __init__(
        self,
        program: WorkerProgram,
        gateways: Sequence[str],
        address: str,
        resources: Mapping[str, Resources],
        access: Access,
    ):
        """Connect to the cluster. Raises StartError, one line, if there is none or its nodes cannot reach the
        gateways."""
        _connect(address)
        nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self.networks: Sequence[str] = [f"{host}/{ipaddress.ip_address(host).max_prefixlen}" for host in sorted(nodes)]
        self.gateways = [_reachable(gateway, nodes) for gateway in gateways]
        has_gpus = "GPU" in ray.cluster_resources()
        self.resources = {role: each if has_gpus else each._replace(num_gpus=0) for role, each in resources.items()}
        self.program, self.access, self.board = program, access, WorkerBoard()
        self._places: dict[str, _Place] = {}
        self._shunned: dict[str, float] = {}
        self.placing = asyncio.Lock()

    async def start(self, role: str, number: int) -> None:
        for _ in range(number):
            name = self.board.new_name(role)
            self.board.add(PlacedWorker(name, role, "starting"))
            self._places[name] = _Place(self, name, role)

    async def drain(self, name: str) -> None:
        self.board.get(name)
        if place := self._places.get(name):
            place.begin_drain()

    async def list(self) -> list[PlacedWorker]:
        return self.board.list()

    def watch(self) -> AsyncIterator[list[PlacedWorker]]:
        return self.board.watch()

    async def close(self) -> bool:
        """Drain all workers; return whether none had to be killed."""
        drains = [place.begin_drain() for place in self._places.values()]
        well = await asyncio.gather(*drains)
        ray.shutdown()
        return all(well)

    async def kill(self) -> None:
        """Kill all workers immediately."""
        for place in self._places.values():
            place.kill()
        ray.shutdown()

    def forget(self, name: str) -> None:
        self._places.pop(name, None)

    def shun(self, node_id: str) -> None:
        """Avoid a node for a while."""
        self._shunned[node_id] = time.monotonic() + _SHUN_S

    def shunned(self) -> set[str]:
        """Return the nodes that are avoided now."""
        self._shunned = {node: until for node, until in self._shunned.items() if until > time.monotonic()}
        return {*self._shunned}

    def nodes_of(self, role: str) -> set[str]:
        """Return the nodes that have workers of a role."""
        return {place.node_id for place in self._places.values() if place.role == role and place.node_id}

    def has_other_nodes(self, than: set[str]) -> bool:
        return any(node["Alive"] and node["NodeID"] not in than for node in ray.nodes())


class _Lost(Exception):
    """The worker of a place is lost, with the reason in words. `shuns`: its node is avoided for the next one."""

    def __init__(self, why: str, shuns: bool = False):
        super().__init__(why)
        self.shuns = shuns


class _Place:
    """The place of one worker: on some node, and filled again on another when its worker is lost."""

    def __init__(self, launcher: RayLauncher, name: str, role: str):
        self._launcher, self._name, self.role = launcher, name, role
        self._actor: Any = None
        self._group: PlacementGroup | None = None
        self.node_id, self._has_served = "", False
        self._drain: asyncio.Task[bool] | None = None
        self._task = asyncio.create_task(self._keep(), name=f"place {name}")

    def begin_drain(self) -> asyncio.Task[bool]:
        """Return the task that drains the worker, whose result says whether the worker ended by itself."""
        if self._drain is None:
            self._launcher.board.change(self._name, state="draining")
            self._drain = asyncio.create_task(self._end(), name=f"drain {self._name}")
        return self._drain

    def kill(self) -> None:
        self._task.cancel()
        self._release()

    async def _end(self) -> bool:
        self._task.cancel()
        await asyncio.wait([self._task])
        well, drain_s = True, self._launcher.program.drain_s.get(self.role, DRAIN_S)
        if self._actor is not None:
            try:
                well = await _answer(self._actor.drain.remote(drain_s), drain_s + _DRAIN_CALL_S)
            except (RayError, TimeoutError):
                well = False
        self._release()
        self._launcher.board.remove(self._name)
        self._launcher.forget(self._name)
        return well

    async def _keep(self) -> None:
        pause_s = _PAUSE_S
        while True:
            begun = time.monotonic()
            try:
                last = await self._live()
            except _Lost as lost:
                if lost.shuns and self.node_id:
                    self._launcher.shun(self.node_id)
                why = str(lost)
            except Exception as error:  # an error of Ray, whose head may be gone: a place is never given up
                why = f"{type(error).__name__}: {one_line(error, 200)}"
            else:
                if last.state == "gone":
                    self._launcher.board.remove(self._name)
                break
            self._release()
            self.node_id = ""
            pause_s = _PAUSE_S if time.monotonic() - begun >= _SETTLED_S else pause_s
            self._change(state="lost", reason=why, address="", where="")
            log(f"baton: {self._name}: {why}; it is placed again")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        self._release()
        self._launcher.forget(self._name)

    async def _live(self) -> Life:
        """Place a worker, follow it to its end, and return its last state. Raises _Lost."""
        try:
            where = await self._begin()
        except RayError as error:
            raise _Lost(f"its actor did not start: {one_line(error, 200)}") from None
        self._change(address=where.address, where=f"{where.host} {where.node_id[:8]}")
        followers = [asyncio.create_task(self._follow()), asyncio.create_task(self._beat(where.address))]
        try:
            done, _ = await asyncio.wait(followers, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for follower in followers:
                follower.cancel()

    async def _begin(self) -> Where:
        """Start the worker in an actor on a node. Raises _Lost or RayError."""
        launcher = self._launcher
        wanted = launcher.resources[self.role]
        self._group = await self._find_room(wanted)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        options = {"num_cpus": wanted.num_cpus, "num_gpus": wanted.num_gpus, "scheduling_strategy": strategy}
        self._actor = ray.remote(WorkerActor).options(**options, max_restarts=0, max_concurrency=16).remote()
        call = self._actor.begin.remote(self._name, self.role, launcher.program, launcher.gateways, settings_env())
        return Where(*await asyncio.wrap_future(call.future()))

    async def _find_room(self, wanted: Resources) -> PlacementGroup:
        """Return a placement group of one bundle for all ranks of a worker, since a bundle is never divided among
        nodes. Lost nodes, and nodes with a worker of this role, are tried last. Raises _Lost."""
        bundle: dict[str, float] = {"CPU": wanted.num_cpus, **({"GPU": wanted.num_gpus} if wanted.num_gpus else {})}
        async with self._launcher.placing:  # so that the next one sees where this one went
            shunned = self._launcher.shunned()
            for avoided, most_s in ((shunned | self._launcher.nodes_of(self.role), _TRY_S), (shunned, _REPORT_S)):
                if not avoided or self._launcher.has_other_nodes(avoided):
                    if group := await self._reserve(bundle, avoided, most_s):
                        return group
        if group := await self._reserve(bundle, set(), _PLACE_S):  # may take minutes, so it holds up no other worker
            return group
        raise _Lost(f"no node of the Ray cluster has room for {_words(bundle)}")

    async def _reserve(self, bundle: dict[str, float], avoided: set[str], most_s: float) -> PlacementGroup | None:
        """Return a group outside the nodes `avoided`; None if there is no room in time."""
        selector = [{"ray.io/node-id": f"!in({','.join(avoided)})"} if avoided else {}]
        group = placement_group([bundle], strategy="SPREAD", bundle_label_selector=selector)
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + most_s:
                if await asyncio.to_thread(group.wait, 1):
                    (self.node_id,) = placement_group_table(group)["bundles_to_node_id"].values()
                    return group
                if time.monotonic() > begun + _REPORT_S:
                    self._change(reason=f"no node of the Ray cluster has room for {_words(bundle)}: it waits")
        except BaseException:
            remove_placement_group(group)
            raise
        remove_placement_group(group)
        return None

    async def _follow(self) -> Life:
        """Report each state of the worker to the board, and return the last. Raises _Lost."""
        num_seen = 0
        while True:
            try:
                num_seen, life = await asyncio.wrap_future(self._actor.life_after.remote(num_seen).future())
            except ActorUnavailableError:  # `_beat` finds out whether it is lost
                await asyncio.sleep(_BEAT_S)
                continue
            except RayError as error:
                raise _Lost(f"its actor is gone: {one_line(error, 200)}") from None
            if life.state == "failed" and self._has_served:
                raise _Lost(f"it did not start again: {life.reason}", shuns=True)
            self._has_served |= life.state == "serving"
            # the worker may have changed its role
            role = {"role": life.fields["role"]} if "role" in life.fields else {}
            self._change(state=life.state, reason=life.reason, exit_status=life.status, **role)
            if life.state in ("gone", "failed"):
                return Life(*life)

    async def _beat(self, address: str) -> Life:
        """Ask the worker and its actor repeatedly; never return. Raises _Lost once neither has answered _MISSES times
        in a row."""
        num_misses = 0
        async with open_channel(address, self._launcher.access, WORKER_NAME) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while num_misses < _MISSES:
                answers = [_worker_answers(health), _actor_answers(self._actor)]
                num_misses = 0 if any(await asyncio.gather(*answers)) else num_misses + 1
                await asyncio.sleep(_BEAT_S)
        raise _Lost("neither it nor its node answers", shuns=True)

    def _change(self, **fields) -> None:
        if self._drain is None:
            self._launcher.board.change(self._name, **fields)

    def _release(self) -> None:
        """End the actor, and with it the worker, and free its resources."""
        actor, group, self._actor, self._group = self._actor, self._group, None, None
        if actor is not None:
            ray.kill(actor)
        if group is not None:
            remove_placement_group(group)


async def _worker_answers(health: Any) -> bool:
    try:
        await health.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError as error:
        return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


async def _actor_answers(actor: Any) -> bool:
    try:
        await _answer(actor.ping.remote(), _ANSWER_S)
    except (RayError, TimeoutError):
        return False
    return True


async def _answer(reference: Any, most_s: float) -> Any:
    """Return the result of an actor's call. Raises TimeoutError, RayError."""
    return await asyncio.wait_for(asyncio.wrap_future(reference.future()), most_s)


def _connect(address: str) -> None:
    """Join the cluster as a driver. Raises StartError."""
    if ray.is_initialized():
        return
    handler, named = signal.getsignal(signal.SIGTERM), address
    try:
        # Ray itself handles a URL such as ray://HOST:PORT.
        if address == "auto" and "://" not in (found := _found_by_ray()):
            address, named = found, f"auto, which is {found}"
        if ":" in address:  # Ray would retry for minutes if nothing listens there
            socket.create_connection(split_address(address), _CONNECT_S).close()
        found = ray.init(
            address, include_dashboard=False if address == "local" else None, logging_level=logging.WARNING
        )
    except (OSError, RuntimeError, ValueError) as error:
        hint = "start one on each node: ray start --head --include-dashboard=false, ray start --address HOST:6379"
        raise StartError(
            f"--launcher ray: no cluster at --address {named}: {one_line(error, 200)}; {hint}", 1
        ) from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's handler ends the process, ours drains
    if dashboard := found.dashboard_url:
        log(f"baton: Ray's dashboard is on: who reaches {dashboard} runs code on every node")


def _found_by_ray() -> str:
    """Return the address that Ray finds for `auto`, by a private function, as there is no public one. If this Ray does
    not have it, return `auto`: Ray then searches itself, for minutes if the cluster is gone."""
    try:
        from ray._private.services import get_ray_address_from_environment
    except ImportError:
        return "auto"
    return get_ray_address_from_environment("auto", None)


def _reachable(gateway: str, nodes: set[str]) -> str:
    """Return the address at which workers can register with a gateway of this host. Raises StartError."""
    host, _, port = gateway.rpartition(":")
    if is_loopback(gateway) and not all(is_loopback(f"{node}:0") for node in nodes):
        reason = f"workers on {', '.join(sorted(nodes))} cannot register at {host}"
        raise StartError(f"--launcher ray: {reason}: give --listen an address of this host that they reach", 2)
    if host not in ("0.0.0.0", "[::]"):
        return gateway
    own = ray.util.get_node_ip_address()
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def _words(bundle: Mapping[str, float]) -> str:
    return " and ".join(f"{number} {kind}" for kind, number in bundle.items())
