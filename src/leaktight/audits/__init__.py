"""The main job: attacks on defenses in a federated scenario, judged against controls, with every result on disk.

`plan` says which trials there are, `experiment` runs one of them, `store` keeps it, `summary` turns the lines of the
store into cells, `verdict` and `checks` into words and warnings, `tradeoff` weighs leakage against accuracy and time.
"""
