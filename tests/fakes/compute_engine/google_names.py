"""Google's services as a machine without an address of its own reaches them."""

ADDRESS = "199.36.153.8"
"""Of private.googleapis.com, by which machines without an address of their own reach Google."""
NAMES = ("storage.googleapis.com", "secretmanager.googleapis.com", "compute.googleapis.com", "oauth2.googleapis.com")
