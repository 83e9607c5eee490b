"""The host's hardware, checked before ranks use it and on request."""
