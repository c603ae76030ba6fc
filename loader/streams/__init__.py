"""Streams that change shape: what a lane yields is found by work on its windows, and agreed upon by all ranks."""
