"""L-BFGS search: one lane after the other; the restarts of a victim end with one that is good enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from leaktight.attacks.matching.problem import Candidate, Found, Plateau, Search, channels_last
from leaktight.attacks.optimizers.compile import Runnable, make_runnable
from leaktight.attacks.optimizers.flat import Layout, vector
from leaktight.attacks.optimizers.lanes import Tree
from leaktight.attacks.optimizers.lbfgs import Lbfgs


def bend(search: Search) -> list[Found]:
    """What was found, by victim; all share one traced function."""
    starts = [[search.start(rng) for rng in row] for row in search.rngs]
    layout = Layout(starts[0][0])
    constants, spec = pytree.tree_flatten(channels_last(search.fixed[0]))

    def flat(point: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        fixed = pytree.tree_unflatten(tensors, spec)
        gradient, value = grad_and_value(lambda here: search.loss(layout.tree(here), {}, fixed))(point)
        return value, gradient

    runnable = make_runnable(flat, [vector(starts[0][0]), *constants], search.attack.backend, search.attack.onednn)
    return [
        Found(_restarts(search, victim, row, runnable, layout.tree), runnable.backend, runnable.onednn)
        for victim, row in enumerate(starts)
    ]


def _restarts(
    search: Search, victim: int, starts: Sequence[Tree], runnable: Runnable, unflatten: Callable[[Tensor], Tree]
) -> list[Candidate]:
    attack, optimizer = search.attack, search.attack.optimizer
    assert isinstance(optimizer, Lbfgs)
    constants = pytree.tree_leaves(channels_last(search.fixed[victim]))

    def evaluate(point: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = runnable(point, *constants)
        return value, gradient

    candidates: list[Candidate] = []
    for start in starts:
        watch = _watch(search, victim, unflatten)
        result = optimizer.search(evaluate, vector(start), attack.iterations, watch, boxed=search.form.boxed)
        candidates.append(search.candidate(victim, unflatten(result.point), result.loss, result.evaluations))
        if attack.stop_below is not None and result.loss < attack.stop_below:
            break
    return candidates


def _watch(search: Search, victim: int, unflatten: Callable[[Tensor], Tree]) -> Callable[[int, float, Tensor], bool]:
    plateau = Plateau(search.attack)

    def watch(evaluations: int, loss: float, point: Tensor) -> bool:
        if search.progress is not None and evaluations % search.attack.progress_every == 0:
            search.progress(victim, evaluations, loss, search.candidate(victim, unflatten(point), loss, 0).images)
        return plateau(evaluations, loss)

    return watch
