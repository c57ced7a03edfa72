"""A plan in words: allowed values, explanations, the reference page."""
