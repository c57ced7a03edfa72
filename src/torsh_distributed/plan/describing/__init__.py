"""A plan in words: allowed values, explanations, and the generated pages."""
