"""What can be wrong with a machine before a run: `software` asks every check; each finds `diagnostic_result`s."""
