"""Comparisons: contenders on prepared data, a process each, in turns, and what came of them."""
