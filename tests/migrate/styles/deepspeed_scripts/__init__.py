"""Scripts as users of deepspeed write them, by the style of its examples."""
