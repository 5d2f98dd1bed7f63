"""What every worker of an audit needs. One process imports it and the workers are forked from that, which saves seconds
of each."""

from __future__ import annotations

import scipy.optimize  # noqa: F401  these are imported only when they are used: scores, matches, traced graphs
import torch._functorch.compile_utils
import torch.fx.experimental.proxy_tensor  # noqa: F401
import torchmetrics.functional.image  # noqa: F401

import leaktight.audit.experiment  # noqa: F401
