"""What works on a whole data set: pack, verify, inspect, audit."""
