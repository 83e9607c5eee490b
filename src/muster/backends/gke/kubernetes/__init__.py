"""The API server: connections, credentials, objects."""
