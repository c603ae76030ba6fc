"""Orders of several sources joined into one: the number of samples of each, and which."""
