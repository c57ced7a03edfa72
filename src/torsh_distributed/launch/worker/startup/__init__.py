"""On the PYTHONPATH of workers: `sitecustomize`, which Python imports first in every process."""
