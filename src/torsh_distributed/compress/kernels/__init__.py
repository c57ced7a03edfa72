"""The arithmetic of the codecs: `base` is the interface, `choice` picks an implementation: C, torch or Triton."""
