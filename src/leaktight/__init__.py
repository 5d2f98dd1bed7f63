"""Leaktight measures what a federated-learning update gives away about its data, and what each defense costs.

The public names are in `__init__.pyi`; each is imported when it is first used.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
