"""How devices and a server come together: `discovery` on a local network, `device_listener` at the port."""
