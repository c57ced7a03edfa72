"""The arithmetic of the codecs: `base` is the interface, with one implementation each in C, torch and Triton."""
