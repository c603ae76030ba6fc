"""Random programmes of users, who keep, change and drop what a loader delivers; see ``__main__``."""
