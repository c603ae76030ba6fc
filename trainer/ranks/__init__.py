"""The ranks of a job: how they meet, and how they talk beside the collectives."""
