"""Runs work on a Ray cluster, with the same results as on this machine."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Generic

from leaktight.core.errors import LeaktightError, MachineError, UsageError
from leaktight.runtime.executor import J, M, OnMessage, R, Work, Workers, ignored
from leaktight.runtime.processes import become_worker
from leaktight.runtime.sharing import dumped, loaded


@dataclass(frozen=True)
class Ray:
    """One worker for every processor of a cluster. Messages of the work arrive with its result.

    address: "ray://host:port" of a running cluster; None starts Ray on this machine, or joins the cluster named
    by the environment. Leaktight, and your own models, must be importable on every machine.
    """

    address: str | None = None

    @contextmanager
    def start(self, work: Work[J, M, R]) -> Iterator[Workers[J, M, R]]:
        try:
            import ray
            import ray.util
        except ImportError as error:
            raise UsageError("--workers ray needs Ray; install it with: pip install 'leaktight[ray]'") from error
        try:
            ray.init(
                address=self.address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if self.address else False,
            )
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            where = self.address or "this machine"
            raise UsageError(f"cannot reach Ray at {where}: {reason}; check --workers") from error
        try:
            yield _Cluster(ray, ray.put(work))
        finally:
            ray.shutdown()


@dataclass(frozen=True)
class _Cluster(Generic[J, M, R]):
    ray: Any
    work: Any
    actors: list[Any] = field(default_factory=list)

    def run(
        self, jobs: Iterable[J], *, shared: Sequence[object] = (), on_message: OnMessage[M] = ignored
    ) -> Generator[tuple[int, R], None, None]:
        waiting = enumerate(jobs)
        common = self.ray.put([dumped(value) for value in shared])
        most = max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        first = list(islice(waiting, most))
        actor = self.ray.remote(num_cpus=1)(Actor)
        self.actors.extend(actor.remote(self.work) for _ in range(len(first) - len(self.actors)))
        pool = self.ray.util.ActorPool(self.actors)
        following = chain(first, waiting)  # a job is asked for when an actor is free
        try:
            while True:
                while pool.has_free() and (job := next(following, None)) is not None:
                    packed = job[0], dumped(job[1], shared)
                    pool.submit(lambda each, own: each.run.remote(*own, common), packed)
                if not pool.has_next():
                    return
                place, messages, value = loaded(pool.get_next_unordered())
                for message in messages:
                    on_message(place, message)
                yield place, value
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LeaktightError):
                raise error.cause from None
            raise
        except self.ray.exceptions.RayError as error:  # an actor or a node is lost, the object store is full
            raise MachineError(
                "a worker of the Ray cluster died (killed, or out of memory?); continue with --resume"
            ) from error


class Actor:
    """A process of the cluster that does one job at a time."""

    def __init__(self, work: Work[object, object, object]) -> None:
        become_worker()
        self.work = work

    def run(self, place: int, job: bytes, common: list[bytes]) -> bytes:
        messages: list[object] = []
        result = self.work(loaded(job, [loaded(value) for value in common]), messages.append)
        return dumped((place, messages, result))
