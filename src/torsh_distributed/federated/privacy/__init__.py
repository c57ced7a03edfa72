"""Differential privacy: `client_privacy` says how updates are clipped and noised, `secure_noise` draws the noise,
`privacy_spent` counts what the rounds have cost."""
