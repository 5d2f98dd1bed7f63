"""Cards that are made up, for tests of the leaderboard."""

from __future__ import annotations

from typing import Any

from tests.results.made import THREAT

from leaktight.results.card import CARD_VERSION, Attacker, Card, Setting, Source, Utility
from leaktight.results.schema import Score, Track


def made_setting(**changes: Any) -> Setting:
    fields: dict[str, Any] = {
        "data": {"kind": "digits"},
        "model": {"kind": "lenet_zhu", "init": "wide"},
        "local": {"learning_rate": 0.01},
        "num_examples": 1,
        "batch_size": 1,
        "local_steps": 1,
        "round": 0,
        "threat": THREAT,
    }
    return Setting.model_validate(fields | changes)


def made_attacker(worst: float, *, adaptive: bool = True, victims: int = 10, **changes: Any) -> Attacker:
    fields: dict[str, Any] = {
        "attack": "csdlg",
        "adaptive": adaptive,
        "victims": victims,
        "psnr": Score(mean=worst - 2, ci95=(worst - 4, worst), worst=worst),
        "worst": worst,
        "reconstructed": victims if worst > 20 else 0,
        "run": "a" * 64,
    }
    return Attacker.model_validate(fields | changes)


def made_utility(accuracy: float | None = 0.9, plain: float | None = 0.9) -> Utility:
    return Utility(accuracy=accuracy, plain_accuracy=plain, seconds=0.2, plain_seconds=0.1, digest="b", config="")


def made_card(
    defense: str = "noise",
    naive: float = 8.0,
    knowing: float | None = 12.0,
    *,
    track: Track = "diagnostic",
    **changes: Any,
) -> Card:
    """A card whose closest guesses have these PSNR; without an attacker who knows the defense if `knowing` is None."""
    attackers = [made_attacker(naive, adaptive=False)]
    if knowing is not None:
        attackers.append(made_attacker(knowing))
    fields: dict[str, Any] = {
        "schema_version": CARD_VERSION,
        "defense": defense,
        "defense_settings": {"noise_std": 0.1} if defense == "noise" else {},
        "track": track,
        "setting": made_setting(),
        "word": "reconstructed" if max(naive, knowing or 0) > 20 else "nothing-found",
        "attackers": tuple(attackers),
        "blind": 10.0,
        "utility": made_utility(),
        "sources": (Source(digest="a" * 64, config="seed = 0\n", victims={"t000": "1234"}),),
    }
    return Card.model_validate(fields | changes).sealed()


def reference(**changes: Any) -> Card:
    """The card of the undefended update."""
    return made_card("none", 60.0, None, **changes)
