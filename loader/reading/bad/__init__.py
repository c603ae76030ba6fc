"""Samples and chunks that cannot be read, decoded or transformed: counted, recorded, replaced."""
