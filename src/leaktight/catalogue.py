"""Every method by name: the name is the catalogue key, the `kind` in a config, and the id of its tests.

To add a method, write its file and add one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from leaktight.adaptive.table import ADAPTATIONS, adapt
from leaktight.attacks.agic import Agic
from leaktight.attacks.baselines import MeanImage, NearestPublicImage
from leaktight.attacks.fishing import Fishing
from leaktight.attacks.ggl import Ggl
from leaktight.attacks.gias import Gias
from leaktight.attacks.glaus import Glaus
from leaktight.attacks.grnn import Grnn
from leaktight.attacks.labels import BiasCorrected, Geng, Given, Idlg, Wainakh, Yin
from leaktight.attacks.last_layer import LabelStrategy
from leaktight.attacks.linear_inversion import LinearInversion
from leaktight.attacks.presets import Cpl, CsDlg, Dlg, GradInversion, IdlgAttack, InvertingGradients, PriorOnly
from leaktight.attacks.rgap import RGap
from leaktight.attacks.robbing_the_fed import RobbingTheFed
from leaktight.core.protocols import Aggregator, Attack, Defense
from leaktight.core.training import Constant, Cosine, Schedule, Steps
from leaktight.crypto.cipher import Cipher
from leaktight.crypto.ckks import Ckks
from leaktight.crypto.paillier import Paillier
from leaktight.data.arrays import Arrays, FemnistDigits, OrlFaces
from leaktight.data.cifar import Cifar10, Cifar100
from leaktight.data.dataset import DatasetSource
from leaktight.data.embedded import Digits, Faces, Photos
from leaktight.data.folders import ImageFolder, Imagenet, Lfw, TinyImagenet, VggFace
from leaktight.data.gaussians import TwoGaussians
from leaktight.data.idx import Emnist, FashionMnist, Mnist
from leaktight.data.joined import Joined
from leaktight.data.partition import BySource, Dirichlet, Iid, LrpShards, OneClass, Pooled, Scheme, Shards
from leaktight.data.rendered_words import RenderedWords
from leaktight.data.words import Icdar, Iiit5k, Svt, Synth90k, SynthText
from leaktight.defenses.ada_lrp import AdaLrp
from leaktight.defenses.adadefense import AdaDefense
from leaktight.defenses.client_dp import ClientDp
from leaktight.defenses.clipping import Clipping
from leaktight.defenses.compression import GradientCompression
from leaktight.defenses.dp_sgd import DpSgd
from leaktight.defenses.fed_cdp import FedCdp
from leaktight.defenses.fedkl import FedKl
from leaktight.defenses.graddefense import GradDefense
from leaktight.defenses.lrp import Lrp
from leaktight.defenses.minmax import MinMaxSampling
from leaktight.defenses.noise import AdditiveNoise
from leaktight.defenses.outpost import Outpost
from leaktight.defenses.precode import Precode
from leaktight.defenses.soteria import Soteria
from leaktight.defenses.stack import Stack
from leaktight.fl.aggregators import FedAvg, FedSgd, ServerAdam, ServerMomentum
from leaktight.fl.encrypted import Encrypted
from leaktight.fl.fedboosting import FedBoosting
from leaktight.fl.fusion import FixedFusion, Fusion, NoisyFusion
from leaktight.metrics import METRICS
from leaktight.models import MODELS
from leaktight.models.gan import GENERATORS

DATASETS: Mapping[str, type[DatasetSource]] = {
    "digits": Digits,
    "photos": Photos,
    "faces": Faces,
    "rendered_words": RenderedWords,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "emnist": Emnist,
    "femnist_digits": FemnistDigits,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "tiny_imagenet": TinyImagenet,
    "imagenet": Imagenet,
    "lfw": Lfw,
    "vgg_face": VggFace,
    "orl_faces": OrlFaces,
    "image_folder": ImageFolder,
    "arrays": Arrays,
    "synth90k": Synth90k,
    "synthtext": SynthText,
    "iiit5k": Iiit5k,
    "svt": Svt,
    "icdar2015": Icdar,
    "two_gaussians": TwoGaussians,
    "joined": Joined,
}

PARTITIONS: Mapping[str, type[Scheme]] = {
    "iid": Iid,
    "shards": Shards,
    "lrp_shards": LrpShards,
    "dirichlet": Dirichlet,
    "one_class": OneClass,
    "by_source": BySource,
    "pooled": Pooled,
}

SCHEDULES: Mapping[str, type[Schedule]] = {"constant": Constant, "cosine": Cosine, "steps": Steps}

AGGREGATORS: Mapping[str, type[Aggregator]] = {
    "fedavg": FedAvg,
    "fedsgd": FedSgd,
    "server_momentum": ServerMomentum,
    "server_adam": ServerAdam,
    "fedboosting": FedBoosting,
    "encrypted": Encrypted,
}

CIPHERS: Mapping[str, type[Cipher]] = {"paillier": Paillier, "ckks": Ckks}

FUSIONS: Mapping[str, type[Fusion]] = {"fixed": FixedFusion, "noisy": NoisyFusion}

ATTACKS: Mapping[str, type[Attack]] = {
    "dlg": Dlg,
    "idlg": IdlgAttack,
    "cpl": Cpl,
    "csdlg": CsDlg,
    "inverting_gradients": InvertingGradients,
    "gradinversion": GradInversion,
    "agic": Agic,
    "grnn": Grnn,
    "ggl": Ggl,
    "gias": Gias,
    "linear_inversion": LinearInversion,
    "rgap": RGap,
    "robbing_the_fed": RobbingTheFed,
    "fishing": Fishing,
    "glaus": Glaus,
    "prior_only": PriorOnly,
    "mean_image": MeanImage,
    "nearest_public_image": NearestPublicImage,
}

LABELS: Mapping[str, type[LabelStrategy]] = {
    "given": Given,
    "idlg": Idlg,
    "yin": Yin,
    "bias_corrected": BiasCorrected,
    "wainakh": Wainakh,
    "geng": Geng,
}

DEFENSES: Mapping[str, type[Defense]] = {
    "none": Defense,
    "noise": AdditiveNoise,
    "clipping": Clipping,
    "compression": GradientCompression,
    "minmax": MinMaxSampling,
    "soteria": Soteria,
    "graddefense": GradDefense,
    "outpost": Outpost,
    "dp_sgd": DpSgd,
    "fed_cdp": FedCdp,
    "client_dp": ClientDp,
    "adadefense": AdaDefense,
    "stack": Stack,
    "lrp": Lrp,
    "ada_lrp": AdaLrp,
    "fedkl": FedKl,
    "precode": Precode,
}

ADAPTIVE: Mapping[type[Defense], Callable[[Attack, Defense], Attack | None]] = dict.fromkeys(
    (*ADAPTATIONS, Stack), adapt
)
"""The attacker who knows a defense: makes of an attack the one that expects this defense; None where it cannot."""

CATALOGUE: Mapping[str, Mapping[str, Any]] = {
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "models": MODELS,
    "generators": GENERATORS,
    "schedules": SCHEDULES,
    "aggregators": AGGREGATORS,
    "ciphers": CIPHERS,
    "fusions": FUSIONS,
    "defenses": DEFENSES,
    "attacks": ATTACKS,
    "labels": LABELS,
    "metrics": METRICS,
}


def describe(entry: Any) -> str:
    """The one line that `leaktight list` prints: an entry's own description, or the start of its docstring."""
    text = getattr(entry, "description", None) or entry.__doc__ or ""
    return " ".join(str(text).split("\n\n")[0].split())
