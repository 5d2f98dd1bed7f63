from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leaktight.core.rng import NoSecretsError, Rng, global_seed
from leaktight.core.secret import SecretStream

PATHS = st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4)


@given(PATHS, PATHS)
def test_different_paths_give_different_streams(left: list[int | str], right: list[int | str]) -> None:
    same = [(type(part), part) for part in left] == [(type(part), part) for part in right]
    assert (Rng(0).child(*left).entropy() == Rng(0).child(*right).entropy()) == same


def test_a_path_of_parts_differs_from_their_concatenation() -> None:
    assert Rng(0).child("ab", "c").entropy() != Rng(0).child("a", "bc").entropy()
    assert Rng(0).child(1).entropy() != Rng(0).child("1").entropy()


def test_streams_are_stable_across_versions() -> None:
    """Golden values: a change here would silently change every published number."""
    assert Rng(7).child("client", 3).entropy(8) == 5024353926808885358
    assert (
        torch.randint(100, (3,), generator=Rng(7).public()).tolist()
        == torch.randint(100, (3,), generator=torch.Generator().manual_seed(Rng(7).entropy(8) >> 1)).tolist()
    )


def test_fresh_roots_differ() -> None:
    assert Rng.fresh() != Rng.fresh()


def test_who_is_told_the_bytes_of_a_place_cannot_compute_its_stream() -> None:
    place = Rng(7, key=bytes(32)).child("client", 3)
    assert SecretStream(place.secret_bytes()).bytes(32) != place.secret().bytes(32)
    assert place.secret_bytes(8) not in place.secret_bytes(32)


def test_secrets_hang_on_the_key_and_the_path_and_not_on_the_seed() -> None:
    place = Rng(7, ("client", 3), bytes(32))
    assert Rng(8, place.path, place.key).secret_bytes() == place.secret_bytes()
    assert place.keyed(b"1" * 32).secret_bytes() != place.secret_bytes()
    assert place.child("round").secret_bytes() != place.secret_bytes()


def test_a_detached_tree_has_no_secrets_and_hides_its_key() -> None:
    place = Rng(7, key=b"key " * 8).child("attack")
    assert "key" not in repr(place)
    with pytest.raises(NoSecretsError, match="secret key"):
        place.detached().secret()
    assert place.detached().public().initial_seed() != place.public().initial_seed()


def test_a_detached_tree_hides_the_seed_where_there_is_a_key() -> None:
    place = Rng(7, key=b"key " * 8).child("attack")
    assert place.detached() == Rng(8, key=place.key).child("attack").detached(), "it does not depend on the seed"
    assert place.detached() != place.keyed(b"KEY " * 8).detached()
    assert place.detached() != Rng(7).child("attack").detached()
    assert place.detached().path == ()
    assert place.detached().key is None
    assert place.detached().seed not in (place.seed, place.entropy())
    assert Rng(7).child("attack").detached() == Rng(7).child("attack").detached()


def test_global_seed_restores_the_generator() -> None:
    before = torch.get_rng_state()
    with global_seed(Rng(1)):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with global_seed(Rng(1)):
        assert torch.equal(torch.rand(3), first)
