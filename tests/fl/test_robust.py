"""Rules in place of the mean: closed forms, independent computations, and what hostile clients cannot do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.seeds import replayed
from torch import Tensor

from leaktight.config.settings import load_config
from leaktight.core.errors import ConfigError, RoundFailedError
from leaktight.core.types import Broadcast, Params, State, Update
from leaktight.fl import robust
from leaktight.fl.aggregators import FedAvg, FedSgd, ServerAdam, ServerMomentum
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.robust import Krum, Median, NormBound, Robust, TrimmedMean

SHAPES: Mapping[str, tuple[int, ...]] = {"w": (3, 2), "b": (4,)}
RULES: Sequence[Robust] = (
    Median(),
    TrimmedMean(trim=0.3),
    Krum(hostile=2),
    Krum(hostile=2, keep=5),
    NormBound(),
    NormBound(bound=0.5),
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def broadcast(buffers: Params | None = None) -> Broadcast:
    params = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return Broadcast(params, buffers or {}, 0)


def drawn(clients: int, seed: int, scale: float = 1.0) -> dict[str, Update]:
    generator = replayed(seed).public()
    return {
        f"c{place:02d}": Update(
            {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}, "delta"
        )
        for place in range(clients)
    }


def lines(*values: float) -> dict[str, Update]:
    """Updates of one number each."""
    return {f"c{place}": Update({"w": torch.tensor([value])}, "delta") for place, value in enumerate(values)}


def combined(
    rule: Robust, updates: Mapping[str, Update], sent: Broadcast | None = None, state: State | None = None
) -> tuple[dict[str, Tensor], State]:
    names = {name: torch.zeros_like(tensor) for each in updates.values() for name, tensor in each.tensors.items()}
    sent = sent or Broadcast(names, {}, 0)
    conversation = rule.aggregate(
        updates, rule.start(sent.params) if state is None else state, broadcast=sent, rng=replayed(0)
    )
    try:
        next(conversation)
    except StopIteration as end:
        change, after = end.value
        return dict(change), after
    raise AssertionError("it asked a question")


def one(rule: Robust, *values: float) -> float:
    return float(combined(rule, lines(*values))[0]["w"])


def rows(updates: Mapping[str, Update]) -> np.ndarray[Any, Any]:
    """The updates as vectors, in the order of their clients' names."""
    return np.stack(
        [
            np.concatenate([updates[client].tensors[name].numpy().ravel() for name in SHAPES])
            for client in sorted(updates)
        ]
    )


def flat(change: Params) -> np.ndarray[Any, Any]:
    return np.concatenate([change[name].numpy().ravel() for name in SHAPES])


def test_closed_forms() -> None:
    assert one(Median(), 1.0, 50.0, 3.0) == 3.0
    assert one(Median(), 1.0, 2.0, 4.0, -1e6) == 1.5
    assert one(TrimmedMean(trim=0.2), 1.0, 2.0, 3.0, 1e6, -1e6) == 2.0
    assert one(TrimmedMean(trim=0.4), 1.0, 2.0, 4.0, 1e6, -1e6) == 2.0
    # n = 5, f = 1: two nearest. 0: 1 + 9; 1: 1 + 4; 3: 4 + 4 (from 1 and 5); 5: 4 + 16; 100: far.
    assert one(Krum(hostile=1), 0.0, 1.0, 3.0, 5.0, 100.0) == 1.0
    assert one(Krum(hostile=1, keep=2), 0.0, 1.0, 3.0, 5.0, 100.0) == 2.0
    assert one(NormBound(bound=2.0), 1.0, -8.0, 4.0) == pytest.approx((1 - 2 + 2) / 3)
    assert one(NormBound(), 1.0, -8.0, 4.0) == pytest.approx((1 - 4 + 4) / 3)


def krum_by_hand(vectors: np.ndarray[Any, Any], hostile: int, keep: int) -> np.ndarray[Any, Any]:
    scores = []
    for place, vector in enumerate(vectors):
        others = np.delete(vectors, place, axis=0)
        squares = sorted(float(np.linalg.norm(vector - other)) ** 2 for other in others)
        scores.append(sum(squares[: len(vectors) - hostile - 2]))
    return np.asarray(vectors[np.argsort(scores)[:keep]].mean(axis=0))


def bounded_by_hand(vectors: np.ndarray[Any, Any], bound: float | None) -> np.ndarray[Any, Any]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    most = np.median(norms) if bound is None else bound
    return np.asarray((vectors * np.minimum(1, most / norms)).mean(axis=0))


OTHERWISE: Sequence[tuple[Robust, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]] = (
    (Median(), lambda vectors: np.median(vectors, axis=0)),
    (TrimmedMean(trim=0.3), lambda vectors: scipy.stats.trim_mean(vectors, 0.3, axis=0)),
    (TrimmedMean(trim=0.2), lambda vectors: scipy.stats.trim_mean(vectors, 0.2, axis=0)),
    (Krum(hostile=2), lambda vectors: krum_by_hand(vectors, 2, 1)),
    (Krum(hostile=2, keep=4), lambda vectors: krum_by_hand(vectors, 2, 4)),
    (NormBound(), lambda vectors: bounded_by_hand(vectors, None)),
    (NormBound(bound=1.5), lambda vectors: bounded_by_hand(vectors, 1.5)),
)


@pytest.mark.parametrize(
    ("rule", "otherwise"), OTHERWISE, ids=lambda each: str(each) if isinstance(each, Robust) else ""
)
@pytest.mark.parametrize("piece", [2**18, 4])
def test_two_computations_agree(
    rule: Robust,
    otherwise: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
    piece: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(robust, "_PIECE", piece)
    for clients, seed in itertools.product((7, 8, 10), range(4)):
        updates = drawn(clients, seed)
        np.testing.assert_allclose(flat(combined(rule, updates)[0]), otherwise(rows(updates)), rtol=1e-5, atol=1e-6)


def test_a_share_is_not_lost_to_rounding() -> None:
    assert TrimmedMean(trim=0.29).cut(100) == 29  # 0.29 * 100 is 28.999999999999996


@every_rule
@given(seed=st.integers(0, 10**6), order=st.permutations(range(8)))
@settings(max_examples=25, deadline=None)
def test_names_of_clients_do_not_matter(rule: Robust, seed: int, order: list[int]) -> None:
    updates = drawn(8, seed)
    names = sorted(updates)
    renamed = {names[place]: updates[name] for place, name in zip(order, names, strict=True)}
    one_way, other_way = flat(combined(rule, updates)[0]), flat(combined(rule, renamed)[0])
    np.testing.assert_allclose(one_way, other_way, rtol=1e-6, atol=1e-7)


@every_rule
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_order_of_arrival_changes_no_bit(rule: Robust, seed: int) -> None:
    updates = drawn(8, seed)
    backward = dict(reversed(updates.items()))
    assert np.array_equal(flat(combined(rule, updates)[0]), flat(combined(rule, backward)[0]))


VALUES = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(trim=0.3)], ids=str)
@given(seed=st.integers(0, 10**6), hostile=st.lists(VALUES, min_size=3, max_size=3), places=st.permutations(range(10)))
@settings(max_examples=50, deadline=None)
def test_three_of_ten_cannot_leave_the_range_of_the_others(
    rule: Robust, seed: int, hostile: list[float], places: list[int]
) -> None:
    honest = drawn(7, seed)
    liars = [Update({name: torch.full(shape, value) for name, shape in SHAPES.items()}, "delta") for value in hostile]
    everyone = {f"x{place}": update for place, update in zip(places, [*honest.values(), *liars], strict=True)}
    change = flat(combined(rule, everyone)[0])
    assert (rows(honest).min(0) - 1e-6 <= change).all()
    assert (change <= rows(honest).max(0) + 1e-6).all()


@pytest.mark.parametrize("keep", [1, 5])
@given(seed=st.integers(0, 10**6), hostile=st.lists(VALUES, min_size=2, max_size=2))
@settings(max_examples=50, deadline=None)
def test_krum_chooses_no_liar_that_is_farther_than_the_honest_from_each_other(
    keep: int, seed: int, hostile: list[float]
) -> None:
    honest = drawn(7, seed, scale=0.01)
    liars = {
        f"c9{place}": Update({name: torch.full(shape, 1 + abs(value)) for name, shape in SHAPES.items()}, "delta")
        for place, value in enumerate(hostile)
    }
    rule = Krum(hostile=2, keep=keep)
    change = flat(combined(rule, {**honest, **liars})[0])
    assert (rows(honest).min(0) - 1e-7 <= change).all()
    assert (change <= rows(honest).max(0) + 1e-7).all()


@given(seed=st.integers(0, 10**6), value=VALUES)
@settings(max_examples=50, deadline=None)
def test_a_bounded_liar_moves_the_mean_by_its_share(seed: int, value: float) -> None:
    honest = drawn(9, seed)
    liar = {"c99": Update({name: torch.full(shape, value) for name, shape in SHAPES.items()}, "delta")}
    still = {"c99": Update({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "delta")}
    rule = NormBound(bound=2.0)
    moved = flat(combined(rule, {**honest, **liar})[0]) - flat(combined(rule, {**honest, **still})[0])
    assert np.linalg.norm(moved) <= 2.0 / 10 + 1e-6


@every_rule
def test_stated_numbers_of_examples_change_nothing(rule: Robust) -> None:
    updates = drawn(8, 0)
    boasting = {name: replace(each, num_examples=10**9 if name == "c00" else 1) for name, each in updates.items()}
    assert rule.needs == frozenset()
    assert np.array_equal(flat(combined(rule, updates)[0]), flat(combined(rule, boasting)[0]))


# Buffers, and tensors that are left out.

RECEIVED: Params = {"mean": torch.tensor([1.0, 2.0]), "count": torch.tensor(10), "flag": torch.tensor(True)}


def with_buffers(clients: int, hostile: Params) -> dict[str, Update]:
    """All but the last clients send honest buffers beside their updates."""
    sent = drawn(clients, 0, scale=0.01)
    for place, name in enumerate(sent):
        honest = {
            "mean": torch.tensor([2.0, 1.0]) + 0.01 * place,
            "count": torch.tensor(15),
            "flag": torch.tensor(True),
        }
        sent[name] = replace(sent[name], buffers=hostile if place >= clients - 2 else honest)
    return sent


@every_rule
def test_hostile_buffers_go_through_the_rule(rule: Robust) -> None:
    hostile = {"mean": torch.tensor([1e6, -1e6]), "count": torch.tensor(2**62), "flag": torch.tensor(False)}
    updates = with_buffers(9, hostile)
    change, _ = combined(rule, updates, broadcast(RECEIVED))
    assert rule.combine_buffers(updates) == {}
    assert "flag" not in change
    assert int(RECEIVED["count"] + change["count"]) == 15
    assert change["count"].dtype == torch.int64
    after = RECEIVED["mean"] + change["mean"]
    if isinstance(rule, NormBound):  # it limits the two liars, and does not leave them out
        assert float((after - torch.tensor([2.0, 1.0])).abs().max()) < 0.7
    else:
        assert float((after - torch.tensor([2.0, 1.0])).abs().max()) < 0.1


@every_rule
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_counters_of_every_type_may_go_down(rule: Robust, dtype: torch.dtype) -> None:
    """The change of an unsigned counter from 5 to 4 is not 255."""
    known = {"count": torch.tensor([5, 5]).to(dtype)}
    updates = drawn(9, 0, scale=0.01)
    for place, client in enumerate(updates):
        updates[client] = replace(updates[client], buffers={"count": torch.tensor([place % 3 + 4, 3]).to(dtype)})
    change = combined(rule, updates, broadcast(known))[0]["count"]
    assert change.dtype == dtype
    first, second = (known["count"] + change).tolist()
    assert 4 <= first <= 6
    assert second == 3


@every_rule
def test_what_the_honest_withhold_cannot_be_set_by_the_others(rule: Robust) -> None:
    updates = drawn(9, 0, scale=0.01)
    for name in list(updates)[:7]:
        updates[name] = replace(updates[name], tensors={"w": updates[name].tensors["w"]})
    for name in list(updates)[7:]:
        updates[name] = replace(updates[name], tensors={**updates[name].tensors, "b": torch.full((4,), 1e6)})
    change, _ = combined(rule, updates, broadcast())
    most = 2 * 0.5 / 9 if isinstance(rule, NormBound) else 0.0
    assert float(change["b"].norm()) <= most + 1e-6


@every_rule
def test_what_nobody_sends_is_not_in_the_change(rule: Robust) -> None:
    updates = {name: replace(each, tensors={"w": each.tensors["w"]}) for name, each in drawn(8, 0).items()}
    assert set(combined(rule, updates, broadcast())[0]) == {"w"}


@every_rule
def test_empty_tensors_and_scalars(rule: Robust) -> None:
    sent = Broadcast({"none": torch.zeros(0, 3), "one": torch.zeros(())}, {}, 0)
    updates = {f"c{k}": Update({"none": torch.zeros(0, 3), "one": torch.tensor(float(k))}, "delta") for k in range(8)}
    change, _ = combined(rule, updates, sent)
    assert change["none"].shape == (0, 3)
    assert change["one"].shape == ()


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_types_are_kept(rule: Robust, dtype: torch.dtype) -> None:
    updates = drawn(8, 0)
    cast = {
        client: replace(each, tensors={name: tensor.to(dtype) for name, tensor in each.tensors.items()})
        for client, each in updates.items()
    }
    change = combined(rule, cast)[0]
    assert {tensor.dtype for tensor in change.values()} == {dtype}
    expected = flat(combined(rule, updates)[0])
    np.testing.assert_allclose(flat({name: each.float() for name, each in change.items()}), expected, atol=0.03)


@every_rule
def test_a_client_that_is_asked_alone_is_taken_as_it_is(rule: Robust) -> None:
    updates = drawn(1, 0, scale=0.01)
    np.testing.assert_array_equal(flat(combined(rule, updates)[0]), rows(updates)[0])


# The step that follows.


@every_rule
def test_the_step_of_another_aggregator_follows(rule: Robust) -> None:
    updates = drawn(8, 0)
    plain = combined(rule, updates)[0]
    quick = replace(rule, of=ServerMomentum(learning_rate=0.5, momentum=0.9))
    first, state = combined(quick, updates)
    second, _ = combined(quick, updates, state=state)
    np.testing.assert_allclose(flat(first), 0.5 * flat(plain), rtol=1e-6)
    np.testing.assert_allclose(flat(second), 0.5 * 1.9 * flat(plain), rtol=1e-6)
    gradient = replace(rule, of=FedSgd(learning_rate=0.1))
    assert gradient.update_kind == "gradient"
    np.testing.assert_allclose(flat(combined(gradient, updates)[0]), -0.1 * flat(plain), rtol=1e-6)
    assert set(combined(replace(rule, of=ServerAdam()), updates)[1]) == {"first", "second"}
    assert replace(rule, of=FedAvg(scheme="I")).loss_scale(10, [10, 30]) == 0.5


# Refusals, before the first round and by name.


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{kind='trimmed_mean', trim=0.5}", r"expected trim in \(0, 1/2\), got 0.5; for the median choose the kind"),
        ("{kind='trimmed_mean', trim=0.0}", "expected trim > 0, got 0"),
        ("{kind='krum', hostile=0}", "expected hostile >= 1, got 0"),
        ("{kind='krum', keep=0}", "expected keep >= 1, got 0"),
        ("{kind='norm_bound', bound=0.0}", "expected bound > 0, got 0"),
        ("{kind='median', of={kind='fedboosting'}}", "got FedBoosting: Median reads every update and sets its own"),
        ("{kind='krum', of={kind='encrypted'}}", "got Encrypted: Krum reads every update"),
        ("{kind='median', of={kind='krum'}}", "got Krum: Median reads every update"),
        ("{kind='encrypted', of={kind='median'}}", "Median compares single updates, and the server cannot read encr"),
        ("{kind='encrypted', of={kind='trimmed_mean'}}", "TrimmedMean compares single updates.*use it without encrypt"),
        ("{kind='encrypted', of={kind='krum'}}", "Krum compares single updates.*encrypt a mean"),
        ("{kind='encrypted', of={kind='norm_bound'}}", "NormBound has to measure.*binds honest clients only"),
    ],
)
def test_refused_when_the_config_is_read(table: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"federation.aggregator={table}"])


def test_refused_from_python_too() -> None:
    with pytest.raises(ValueError, match="Median compares single updates"):
        Encrypted(of=Median())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got FedBoosting"):
        Median(of=FedBoosting())


@pytest.mark.parametrize(
    ("rule", "clients", "message"),
    [
        (Median(), 2, "at least 3 clients in a round, got 2"),
        (TrimmedMean(trim=0.2), 4, "at least 5 clients in a round, got 4"),
        (Krum(hostile=2), 6, r"2 \* 2 \+ 3 = 7 clients in a round, got 6"),
        (Krum(hostile=1, keep=5), 5, "keep <= clients in a round - hostile = 4, got 5"),
        (NormBound(), 2, "at least 3 clients in a round, got 2"),
    ],
    ids=str,
)
def test_too_few_clients(rule: Robust, clients: int, message: str) -> None:
    assert rule.why_too_few(clients + 1) is None or isinstance(rule, Krum)
    with pytest.raises(RoundFailedError, match=message):
        combined(rule, drawn(clients, 0))


def test_a_fixed_bound_needs_no_others() -> None:
    assert NormBound(bound=1.0).why_too_few(1) is None
