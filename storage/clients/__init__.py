"""One store a kind of URL: local files, clouds, web servers, and whatever fsspec knows."""
