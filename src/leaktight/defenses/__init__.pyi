from .ada_lrp import AdaLrp as AdaLrp
from .adadefense import AdaDefense as AdaDefense
from .client_dp import ClientDp as ClientDp
from .clipping import Clipping as Clipping
from .compression import GradientCompression as GradientCompression
from .dp_sgd import DpSgd as DpSgd
from .fed_cdp import FedCdp as FedCdp
from .fedkl import FedKl as FedKl
from .graddefense import GradDefense as GradDefense
from .lrp import Lrp as Lrp
from .minmax import MinMaxSampling as MinMaxSampling
from .noise import AdditiveNoise as AdditiveNoise
from .outpost import Outpost as Outpost
from .percentile_privacy import PercentilePrivacy as PercentilePrivacy
from .precode import Precode as Precode
from .soteria import Soteria as Soteria
from .stack import Stack as Stack
from .wrap import wrap as wrap

__all__: list[str]
