"""S3 for benchmarks: a server started here, its buckets, and a line that delays."""
