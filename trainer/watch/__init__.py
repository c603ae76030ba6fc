"""Watching for ranks that stall, die or are asked to stop, and for loss spikes."""
