"""A federation on Flower: the requests of `fl.protocol` as Flower messages."""

from __future__ import annotations

import os
from importlib.util import find_spec

from leaktight.core.errors import UsageError

SWITCHED_OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Settings that turn off telemetry, update checks, automatic installation and warnings of Flower and Ray."""

for _name, _value in SWITCHED_OFF.items():  # Flower reads them when it is imported
    os.environ.setdefault(_name, _value)

if find_spec("flwr") is None:
    raise UsageError("Flower is not installed; install it with: pip install 'leaktight[flower]'")
