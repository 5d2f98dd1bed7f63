"""The front door: what `leaktight.audit`, `tradeoff`, `inspect` and `train` do, for Python and the command line alike.

Each command is planned first (everything is read and checked, nothing is attacked) and then run in its folder.
"""
