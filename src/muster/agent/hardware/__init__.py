"""The host's hardware, looked at before ranks use it and whenever somebody asks."""
