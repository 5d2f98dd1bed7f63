"""The words for what a run grows by."""

from __future__ import annotations

from leaktight.config.growth import check_audit


def test_new_methods_are_named_as_everywhere() -> None:
    """With all settings of an attack, the sentence was cut in the middle of them."""
    noise = {"kind": "noise", "at": "step", "distribution": "gaussian", "noise_std": 0.1}
    csdlg = {"kind": "csdlg", "iterations": 150, "restarts": 1, "local": "simulate", "backend": "fx"}
    held = {"audit": {"trials": 1}, "defense": [], "attack": []}
    assert check_audit("run", held, {**held, "defense": [noise], "attack": [csdlg]}) == [
        "defense noise (noise_std 0.1) is new",
        "attack csdlg is new",
    ]
