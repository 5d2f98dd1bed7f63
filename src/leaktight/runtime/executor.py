"""Runs work in this process, in worker processes, or on Ray (`runtime.cluster`), with the same results.

    with executor.start(work) as workers:
        for place, result in workers.run(jobs):
            ...

Work is called with a job and with `tell`, which sends messages to the main process. Every worker computes on one
thread, so neither the number of workers nor the order in which they finish changes a result.
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
"""Sends a message from running work to the main process."""

OnMessage: TypeAlias = Callable[[int, M], None]
"""Called in the main process with the index of a job and a message of its work."""

Work: TypeAlias = Callable[[J, Tell[M]], R]
"""What is done with a job. It is pickled, so it must be a module-level function or an instance of such a class."""


def ignored(place: int, message: object) -> None:
    """An `OnMessage` that does nothing."""


class Workers(Protocol[J_contra, M_co, R_co]):
    """Started workers for one kind of work."""

    def run(
        self, jobs: Iterable[J_contra], *, shared: Sequence[object] = (), on_message: OnMessage[M_co] = ignored
    ) -> Generator[tuple[int, R_co], None, None]:
        """The index and the result of every job, in the order in which they finish.

        shared: objects that several jobs refer to (the model of a round); they are sent once. An error of the work is
        raised here. An error, or closing the generator, ends all workers at once.
        """
        ...


class Executor(Protocol):
    """Where work runs: `Inline`, `Processes` or `Ray`."""

    def start(self, work: Work[J, M, R]) -> AbstractContextManager[Workers[J, M, R]]:
        """Start workers; they end with the `with` block."""
        ...


@dataclass(frozen=True)
class Inline:
    """Runs work in this process, with its present number of threads."""

    @contextmanager
    def start(self, work: Work[J, M, R]) -> Iterator[Workers[J, M, R]]:
        yield _ThisProcess(work)


@dataclass(frozen=True)
class _ThisProcess(Generic[J, M, R]):
    work: Work[J, M, R]

    def run(
        self, jobs: Iterable[J], *, shared: Sequence[object] = (), on_message: OnMessage[M] = ignored
    ) -> Generator[tuple[int, R], None, None]:
        for place, job in enumerate(jobs):
            yield place, self.work(job, partial(on_message, place))


def in_order(results: Iterable[tuple[int, R]], done: Callable[[int, R], None] = ignored) -> list[R]:
    """Results in the order of their jobs. done: called with the index and the result of each as soon as it is there.

    >>> in_order([(1, "b"), (0, "a")])
    ['a', 'b']
    """
    found: dict[int, R] = {}
    for place, result in results:
        found[place] = result
        done(place, result)
    return [found[place] for place in sorted(found)]
