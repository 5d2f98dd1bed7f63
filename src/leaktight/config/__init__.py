"""Settings: TOML, the catalogue, and experiments made of them."""
