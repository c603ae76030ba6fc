"""Mixtures: several data sets read as one stream, each with fields, decoders, transforms and epochs of its own."""
