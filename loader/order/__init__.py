"""Order of samples: arithmetic alone, without I/O."""
