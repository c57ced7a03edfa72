"""Choosing a plan before the job runs."""
