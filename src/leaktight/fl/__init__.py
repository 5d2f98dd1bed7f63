"""Federated learning: clients, the server's protocol, aggregators, and local training. Start at `protocol.py`."""
