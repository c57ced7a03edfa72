"""Mixture of experts: layers whose experts are spread over ranks."""
