"""Settings from TOML, the catalogue of methods, and the experiments built from them."""
