"""What a job will wait for on machines that are not there yet: a simulation of its ranks. Arithmetic alone, no I/O."""
