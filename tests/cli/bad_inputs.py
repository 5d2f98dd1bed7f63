"""What people get wrong on the command line: calls that have to end with one plain sentence.
Words of a call are separated by blanks alone.

Files that they name are those of `write_files`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from leaktight.core.inputs import Images
from leaktight.models.small import Mlp

CAPTURED = "inspect --model mlp --before a.pt --after b.pt --shape 1,8,8 --dry-run"

CALLS = (
    # commands and options
    "audti",
    "audit --trails 3",
    "audit --trials",
    "train --engine flowr",
    "train --workers 0",
    "train --workers many",
    "train --from-round 0 --resume",
    "train --from-round 2",
    "inspect",
    "report",
    "verify",
    "leaderboard submit",
    "audit a.toml b.toml",
    "generator trian",
    "generator train",
    "docs audti",
    "list attacs",
    "list attacks dgl",
    "list recipes outpost",
    "audit recipe:outpost",
    "audit --workers many --dry-run",
    "audit --retry-failed",
    "audit --budget forever --dry-run",
    "audit --budget=-3 --dry-run",
    "audit --budget thorough --attack csdlg --dry-run",
    "audit --trials none --dry-run",
    "audit --trials 0 --dry-run",
    "audit --confidence 2 --dry-run",
    "audit --fail-on everything",
    "audit --fail-on labels --dry-run",
    "audit --resume",
    "data mnits",
    "report nowhere",
    "report . --format pdf",
    "report . --redact --format md",
    "verify nowhere",
    "leaderboard nowhere",
    "leaderboard add nowhere",
    "leaderboard updates nowhere.json",
    "flower key state ../x",
    "flower export .",
    # overrides
    "audit --set audit",
    "audit --set audit.trials",
    "audit --set =3",
    "audit --set nothing.here=1",
    "audit --set audit=3",
    "audit --set model=[1,2]",
    "audit --set attack=[]",
    "audit --set attack=3",
    "audit --set defense=[1]",
    "audit --set attack.iterations=20 --attack csdlg --attack dlg",
    "audit --set audit.local=3",
    "audit --set production=3",
    "audit --set production.nothing.x=3",
    "audit --set model.kind=lenet",
    "audit --set model.kind=[1]",
    "audit --set model.activation=relo --dry-run",
    "audit --set model.init=nowhere.pt --dry-run",
    "audit --set model.mode=both",
    "audit --set data.kind=cifar",
    "audit --set data.kind=cifar10 --dry-run",
    "audit --set data.size=[8,8]",
    "audit --set data.size={a=1}",
    "audit --set data.test_share=2 --dry-run",
    "audit --set partition.clients=0 --dry-run",
    "audit --set partition.clients=many",
    "audit --set partition.clients=100000 --dry-run",
    "audit --set local.learning_rate=-1 --dry-run",
    "audit --set local.learning_rate=[0.1]",
    "audit --set local.schedule=3",
    'audit --set local.schedule={kind="steps",milestones=[3,2]} --dry-run',
    "audit --set local.batch_size=0 --dry-run",
    "audit --set local.nesterov=perhaps",
    "audit --set federation.rounds=0 --dry-run",
    "audit --set federation.per_round=1000 --dry-run",
    "audit --set federation.aggregator=[1]",
    'audit --set federation.aggregator={kind="mean"}',
    "audit --set threat.preset=evil",
    'audit --set threat.knows=["everything"]',
    "audit --set threat.knows=3",
    'audit --set audit.metrics=["psrn"]',
    "audit --set audit.metrics=3",
    'audit --set audit.targets=["client-999"] --dry-run',
    "audit --set audit.attack_round=99 --dry-run",
    "audit --set seed=x",
    "audit --set secret_seed=12",
    "audit --attack dgl",
    "audit --attack nowhere:Attack",
    "audit --attack os:path",
    "audit --attack json:JSONDecoder --dry-run",
    "audit --defense outpots",
    "audit --defense outpost --defense outpost --dry-run",
    'audit --set defense={kind="stack",parts=[1]}',
    'audit --set defense={kind="stack",parts=3}',
    'audit --set defense={kind="noise",noise_std=-1} --dry-run',
    'audit --set defense={kind="noise",noise_std="strong"}',
    'audit --set defense={kind="compression",prune_share=2} --dry-run',
    'audit --set model={kind="mlp",hidden=[]} --dry-run',
    'audit --set model={kind="mlp",mean=[0.5,0.5]} --dry-run',
    'audit --set model={kind="mlp",std=[0]} --dry-run',
    'train --set federation.aggregator={kind="trimmed_mean",trim=0.9} --dry-run',
    # files
    "audit nofile.toml",
    "audit .",
    "audit broken.toml",
    "audit picture.png",
    "audit unknown.toml",
    "audit --set data.kind=image_folder --dry-run",
    'audit --set data={kind="image_folder",path="nowhere"} --dry-run',
    'audit --set data={kind="arrays",path="one.npz"} --dry-run',
    'audit --set data={kind="arrays",path="flat.npz"} --dry-run',
    "generator train --data digits --size 4 --out g.safetensors",
    "generator train --data digits --kind gan --out g.safetensors",
    # captured updates
    "inspect --model mlp --before a.pt --shape 1,8,8",
    "inspect --model mlp --before nowhere.pt --after b.pt --shape 1,8,8",
    "inspect --model mlp --before a.pt --after b.pt --shape 1,8",
    "inspect --model mlp --before a.pt --after b.pt --shape one,8,8",
    "inspect --model mlp --before a.pt --after b.pt --shape 1,9,9",
    "inspect --model mlp --before a.pt --after b.pt --shape 1,0,8",
    "inspect --model mlpp --before a.pt --after b.pt --shape 1,8,8",
    "inspect --model mlp --before a.pt --after small.pt --shape 1,8,8",
    "inspect --model mlp --before a.pt --update b.pt --shape 1,8,8",
    "inspect --model mlp --before picture.png --after b.pt --shape 1,8,8",
    f"{CAPTURED} --local foo=1",
    f"{CAPTURED} --local learning_rate",
    f"{CAPTURED} --local learning_rate=fast",
    f"{CAPTURED} --labels 1,2 --batch-size 3",
    f"{CAPTURED} --labels 11",
    f"{CAPTURED} --labels one",
    f"{CAPTURED} --mean 0.5",
    f"{CAPTURED} --mean 0.5,0.5 --std 1,1",
    f"{CAPTURED} --std 0",
    f"{CAPTURED} --classes 3",
    f"{CAPTURED} --kind gradient",
    f"{CAPTURED} --mode both",
    f"{CAPTURED} --truth nowhere.png",
    f"{CAPTURED} --truth flat.npz",
    f"{CAPTURED} --attack dgl",
    f"{CAPTURED} --set nothing.x=1",
)


def write_files(folder: Path) -> None:
    """The files that the calls name."""
    weights = Mlp().build(Images(1, 8, 8), 10).state_dict()
    torch.save(weights, folder / "a.pt")
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, folder / "b.pt")
    torch.save({"1.weight": torch.ones(3, 4)}, folder / "small.pt")
    (folder / "broken.toml").write_text("[data\nkind = ")
    (folder / "unknown.toml").write_text("[modle]\nkind = 'mlp'\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    np.savez(folder / "one.npz", images=np.zeros((3, 8, 8)))
    np.savez(folder / "flat.npz", images=np.zeros((3, 8)), labels=np.zeros((3, 2)))
