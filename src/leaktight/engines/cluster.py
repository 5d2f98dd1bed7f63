"""Independent tasks on a Ray cluster: the same results as on this machine, from more machines."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

from leaktight.core.errors import LeaktightError, UsageError
from leaktight.core.processes import become_worker
from leaktight.engines.tasks import Job, Task
from leaktight.fl.wire import decode, encode


class Seat:
    """A place on the cluster that holds the task and works on one job at a time, on one thread."""

    def __init__(self, task: Task) -> None:
        become_worker()
        self.task = task

    def run(self, job: bytes) -> bytes:
        return encode(self.task(decode(job)))


def run_on_ray(task: Task, jobs: Sequence[Job], *, address: str | None = None) -> Generator[Job, None, None]:
    """Results in order of completion, one seat for every processor of the cluster.

    address: "ray://host:port" of a running cluster; None starts Ray on this machine, or joins the cluster that the
    environment names. Leaktight, and a model of your own, must be importable on every machine.
    """
    ray = _ray()
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if address else False,
        )
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"cannot reach Ray at {address or 'this machine'}: {reason}; check --workers") from error
    try:
        yield from _seated(ray, task, jobs)
    finally:
        ray.shutdown()


def _seated(ray: Any, task: Task, jobs: Sequence[Job]) -> Generator[Job, None, None]:
    number = min(max(1, int(ray.cluster_resources().get("CPU", 1))), len(jobs))
    place = ray.remote(num_cpus=1)(Seat)
    shared = ray.put(task)
    pool = ray.util.ActorPool([place.remote(shared) for _ in range(number)])
    try:
        for result in pool.map_unordered(lambda seat, job: seat.run.remote(job), [encode(job) for job in jobs]):
            yield decode(result)
    except ray.exceptions.RayActorError as error:
        raise LeaktightError(
            "a worker of the Ray cluster died (killed, or out of memory?); continue with --resume"
        ) from error


def _ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise UsageError("--workers ray needs Ray; install it with: pip install 'leaktight[ray]'") from error
    return ray
