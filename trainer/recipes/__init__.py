"""Recipes, and those that ship: the TOML files here and what they name. Each runs on a CPU in minutes."""
