"""Command lines of DeepSpeed's launcher; imports no torch."""
