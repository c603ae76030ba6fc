"""Tools for whole data sets: pack, verify, inspect, audit."""
