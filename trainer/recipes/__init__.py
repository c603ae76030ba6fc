"""Recipes that ship: what the TOML files beside this one name. Each runs on a CPU in minutes."""
