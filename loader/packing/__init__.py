"""Documents of any length packed into sequences of one length: pure functions on arrays, and tokenising."""
