"""The arithmetic of the codecs: `base` is the interface, `kernel_choice` picks C, torch or Triton."""
