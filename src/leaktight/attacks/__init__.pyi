from .controls import MeanImage as MeanImage
from .controls import PriorOnly as PriorOnly
from .controls import PublicImage as PublicImage
from .exact.linear_inversion import LinearInversion as LinearInversion
from .exact.rgap import RGap as RGap
from .generative.ggl import Ggl as Ggl
from .generative.gias import Gias as Gias
from .generative.grnn import Grnn as Grnn
from .labels.rules import BiasCorrected as BiasCorrected
from .labels.rules import Geng as Geng
from .labels.rules import Given as Given
from .labels.rules import Idlg as Idlg
from .labels.rules import Wainakh as Wainakh
from .labels.rules import Yin as Yin
from .malicious.fishing import Fishing as Fishing
from .malicious.robbing_the_fed import RobbingTheFed as RobbingTheFed
from .matching.attack import Matching as Matching
from .presets.agic import Agic as Agic
from .presets.cpl import Cpl as Cpl
from .presets.csdlg import CsDlg as CsDlg
from .presets.dlg import Dlg as Dlg
from .presets.glaus import Glaus as Glaus
from .presets.gradinversion import GradInversion as GradInversion
from .presets.idlg import IdlgAttack as IdlgAttack
from .presets.inverting_gradients import InvertingGradients as InvertingGradients
from .retrieval import NearestPublicImage as NearestPublicImage

__all__: list[str]
