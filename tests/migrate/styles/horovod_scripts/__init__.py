"""Scripts as users of horovod write them, by the style of its examples."""
