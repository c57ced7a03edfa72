"""The optimizer over offloaded state: `targets` are what it updates, `adam` how."""
