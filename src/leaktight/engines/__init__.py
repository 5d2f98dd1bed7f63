"""What runs a federation: `inprocess` on one machine, `flower` over Flower; `training` keeps a run in a folder."""
