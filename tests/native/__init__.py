"""The compiled modules under the compiler's sanitizers."""
