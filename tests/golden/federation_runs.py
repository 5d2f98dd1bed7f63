"""Every defense in a client's rounds, every aggregator on both carriers, and what a federation begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tests.golden.doors import (
    Defense,
    LocalTraining,
    UpdateKind,
    federation_of,
    in_process,
    made,
    on_flower,
    play,
)

Parts = Mapping[str, Any]
Run = Callable[[], Parts]

DEFENSES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "noise": {"noise_std": 0.01},
    "clipping": {"clip_norm": 0.1, "scope": "layer"},
    "compression": {},
    "minmax": {},
    "percentile_privacy": {},
    "soteria": {},
    "graddefense": {},
    "outpost": {},
    "dp_sgd": {"noise_multiplier": 0.01},
    "fed_cdp": {"noise_multiplier": 0.01},
    "client_dp": {"noise_multiplier": 0.01},
    "adadefense": {},
    "lrp": {},
    "ada_lrp": {},
    "fedkl": {"key_length": 16},
    "precode": {"latent_size": 8},
    "stack": {},
}
"""Settings of each defense for a network of a few thousand weights."""

OTHER_WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "noise-laplace-update": ("noise", {"distribution": "laplace", "at": "update"}),
    "clipping-example": ("clipping", {"scope": "example", "clip_norm": 0.01}),
    "compression-global": ("compression", {"scope": "global"}),
    "minmax-step": ("minmax", {"at": "step", "keep_share": 0.5}),
    "graddefense-code": ("graddefense", {"compensation_scale": 0.1, "variant": "code"}),
    "outpost-element": ("outpost", {"fisher": "element", "decay": 0.0}),
    "outpost-code": ("outpost", {"variant": "code", "decay": 0.0}),
    "fed_cdp-module": ("fed_cdp", {"layers": "module", "final_clip_norm": 1.0}),
    "adadefense-yogi-code": ("adadefense", {"form": "yogi", "variant": "code"}),
    "fedkl-code": ("fedkl", {"key_length": 16, "variant": "code"}),
}


def defense_of(kind: str) -> Defense:
    settings = DEFENSES[kind]
    parts = {"parts": (defense_of("clipping"), made("defenses", "compression"))} if kind == "stack" else {}
    found: Defense = made("defenses", kind, **settings, **parts)
    return found


def one_step_of(kind: str) -> UpdateKind:
    """What a client sends after one step: a gradient, or a change where the defense acts on nothing else."""
    return "delta" if kind in ("lrp", "ada_lrp", "client_dp") else "gradient"


def defended(kind: str, defense: Defense) -> Parts:
    """Two rounds of a client, the second with the memory of the first, and a round of one step."""
    local = LocalTraining(epochs=2, batch_size=2, learning_rate=0.1)
    settings: dict[str, Any] = {"count": 4, "local": local, "kind": "delta"}
    first = play(defense, **settings)
    second = play(defense, **settings, round_index=1, state=first.state)
    one_step = play(defense, count=4, local=replace(local, epochs=1, batch_size=4), kind=one_step_of(kind))
    scenes = {"first": first, "second": second, "one_step": one_step}
    updates = {name: scene.seen.update for name, scene in scenes.items()}
    return {
        **{name: dict(update.tensors) for name, update in updates.items()},
        "buffers": [dict(update.buffers or {}) for update in updates.values()],
        "learning_rates": [scene.learning_rates for scene in scenes.values()],
        "truth": [scene.truth.inputs for scene in scenes.values()],
    }


DEFENDED: Mapping[str, Run] = {
    **{kind: partial(defended, kind, defense_of(kind)) for kind in DEFENSES},
    **{
        name: partial(defended, kind, made("defenses", kind, **settings))
        for name, (kind, settings) in OTHER_WAYS.items()
    },
}

FEDERATION = f"""
seed = 5
secret_seed = "{"ab" * 32}"
[data]
kind = "digits"
size = 8
[partition]
kind = "dirichlet"
clients = 3
[model]
kind = "lenet_zhu"
init = "wide"
[local]
epochs = 1
batch_size = 32
learning_rate = 0.1
momentum = 0.5
[federation]
rounds = 2
per_round = 3
"""
PAILLIER = "{kind='paillier', bound=16.0, key_bits=256, unsafe_small=true}"
AGGREGATORS: Mapping[str, tuple[str, ...]] = {
    "fedavg": ("federation.per_round=2",),
    "fedavg-outpost": ("defense={kind='outpost'}",),
    "fedavg-resnet20": ("model={kind='resnet20'}", "local.samples=32", "federation.rounds=1"),
    "fedsgd": ("federation.aggregator={kind='fedsgd'}", "local.momentum=0.0", "local.samples=32"),
    "server_momentum": ("federation.aggregator={kind='server_momentum'}",),
    "server_adam": ("federation.aggregator={kind='server_adam'}",),
    "median": ("federation.aggregator={kind='median'}",),
    "median-resnet20": (
        "model={kind='resnet20'}",
        "local.samples=32",
        "federation.rounds=1",
        "federation.aggregator={kind='median'}",
    ),
    "trimmed_mean": ("federation.aggregator={kind='trimmed_mean', trim=0.34}",),
    "krum": ("partition.clients=5", "federation.per_round=5", "federation.aggregator={kind='krum'}"),
    "norm_bound": ("federation.aggregator={kind='norm_bound', of={kind='server_momentum'}}",),
    "fedboosting": ("federation.aggregator={kind='fedboosting'}",),
    "fedboosting-code": ("federation.aggregator={kind='fedboosting', variant='code'}",),
    "fedboosting-noisy": ("federation.aggregator={kind='fedboosting', fusion={kind='noisy'}}",),
    "encrypted": (f"federation.aggregator={{kind='encrypted', cipher={PAILLIER}}}",),
}
ON_FLOWER = ("fedavg", "median", "krum", "fedboosting", "encrypted")


def trained(name: str, carrier: Callable[[Any], Parts]) -> Parts:
    return carrier(federation_of(FEDERATION, *AGGREGATORS[name]))


TRAINED: Mapping[str, Run] = {
    **{f"in_process/{name}": partial(trained, name, in_process) for name in AGGREGATORS},
    **{f"flower/{name}": partial(trained, name, on_flower) for name in ON_FLOWER},
}
