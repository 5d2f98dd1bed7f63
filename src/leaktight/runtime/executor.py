"""Where work is done: in this process, in worker processes, or (`runtime.cluster`) on Ray. The results are the same.

    with executor.start(work) as workers:
        for place, result in workers.run(jobs):
            ...

Work is called with a job and with `tell`, by which it can speak while it runs. Every worker computes on one thread, so
neither their number nor the order in which they finish changes a bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

J = TypeVar("J")
M = TypeVar("M")
R = TypeVar("R")
J_contra = TypeVar("J_contra", contravariant=True)
M_co = TypeVar("M_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)

Tell: TypeAlias = Callable[[M], None]
"""How work speaks to the main process while it runs."""

Told: TypeAlias = Callable[[int, M], None]
"""Who listens: called in the main process with the place of a job and what its work tells."""

Work: TypeAlias = Callable[[J, Tell[M]], R]
"""What is done with a job: a function at the top of a module, or a value of a class that stands there."""


def unheard(place: int, message: object) -> None:
    """Nobody listens."""


class Workers(Protocol[J_contra, M_co, R_co]):
    """Holders of one piece of work."""

    def run(
        self, jobs: Iterable[J_contra], *, shared: Sequence[object] = (), told: Told[M_co] = unheard
    ) -> Generator[tuple[int, R_co], None, None]:
        """The place and the result of every job, as they come in. Jobs are taken as workers become free.

        shared: objects that several jobs refer to (the model of a round); they travel once. An error of the work is
        raised here. Closing the generator, or an error, ends all workers at once, whatever they do.
        """
        ...


class Executor(Protocol):
    """Who does work: `Inline`, `Processes` or `Ray`."""

    def start(self, work: Work[J, M, R]) -> AbstractContextManager[Workers[J, M, R]]:
        """Workers for as long as the block runs."""
        ...


@dataclass(frozen=True)
class Inline:
    """This process, with the threads that it has."""

    @contextmanager
    def start(self, work: Work[J, M, R]) -> Iterator[Workers[J, M, R]]:
        yield _ThisProcess(work)


@dataclass(frozen=True)
class _ThisProcess(Generic[J, M, R]):
    work: Work[J, M, R]

    def run(
        self, jobs: Iterable[J], *, shared: Sequence[object] = (), told: Told[M] = unheard
    ) -> Generator[tuple[int, R], None, None]:
        for place, job in enumerate(jobs):
            yield place, self.work(job, partial(told, place))


def in_order(results: Iterable[tuple[int, R]], done: Callable[[int, R], None] = unheard) -> list[R]:
    """Results in the order of their jobs. done: called with each, and before that its place, as soon as it is there.

    >>> in_order([(1, "b"), (0, "a")])
    ['a', 'b']
    """
    found: dict[int, R] = {}
    for place, result in results:
        found[place] = result
        done(place, result)
    return [found[place] for place in sorted(found)]
