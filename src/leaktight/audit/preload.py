"""What every worker of an audit needs. One process imports it and the workers are forked from that, which saves seconds
of each."""

from __future__ import annotations

import torchmetrics.functional.image  # noqa: F401  the scores import it only when they are computed

import leaktight.audit.experiment  # noqa: F401
