"""The ranks of a job: how they come together, and how they agree outside the training collectives."""
