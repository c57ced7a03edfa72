"""Scripts as users of fairscale write them, by the style of its examples."""
