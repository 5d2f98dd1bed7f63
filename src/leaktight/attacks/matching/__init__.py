"""The matching loop: search space, simulated update, objective and priors. Start reading at `attack.py`."""
