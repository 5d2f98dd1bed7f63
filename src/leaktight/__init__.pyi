from . import attacks as attacks
from . import defenses as defenses
from .api.audit import audit as audit
from .api.audit import tradeoff as tradeoff
from .api.inspect import inspect as inspect
from .api.reconstruct import Reconstructed as Reconstructed
from .api.reconstruct import reconstruct as reconstruct
from .api.train import train as train
from .config.settings import Config as Config
from .config.settings import load_config as load_config
from .core.errors import LeaktightError as LeaktightError
from .core.inputs import Images as Images
from .core.protocols import ActiveAttack as ActiveAttack
from .core.protocols import Aggregator as Aggregator
from .core.protocols import Attack as Attack
from .core.protocols import Defense as Defense
from .core.rng import Rng as Rng
from .core.threat import Knowledge as Knowledge
from .core.threat import ThreatModel as ThreatModel
from .core.training import LocalTraining as LocalTraining
from .core.types import Batch as Batch
from .core.types import Examples as Examples
from .core.types import Observation as Observation
from .core.types import Reconstruction as Reconstruction
from .core.types import Update as Update
from .data.dataset import Dataset as Dataset
from .results.schema import Cell as Cell
from .results.schema import Flag as Flag
from .results.schema import Summary as Summary
from .results.schema import TrainingSummary as TrainingSummary
from .results.schema import Trial as Trial
from .results.schema import Verdict as Verdict

__version__: str
__all__: list[str]
