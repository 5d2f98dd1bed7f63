"""The functions `audit`, `tradeoff`, `inspect` and `train` of Leaktight, for Python and the command line.

Each first plans (reads and checks everything), then runs in its folder.
"""
