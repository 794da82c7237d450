"""Deployment planning for `k3hal plan`: a recipe on hardware becomes launches, with a reason for each flag."""
