"""Our strategies for other trainers; each module imports the trainer it is for, so import it only there."""
