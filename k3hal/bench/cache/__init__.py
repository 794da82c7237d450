"""`k3hal bench cache`: traces replayed through the real cache and scheduler, without a model."""
