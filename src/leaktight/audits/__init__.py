"""Audits: attacks on defenses in a federated scenario, compared with controls, every result in a folder.

`plan` lists the trials, `experiment` runs one, `cells` groups them by attack and defense, `verdict` and `checks` draw
conclusions and raise flags, `tradeoff` compares leakage with accuracy and time, `run` does all of it.
"""
