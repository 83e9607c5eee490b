"""Google's REST services: one request, credentials, retries."""
