"""Energy and carbon."""
